/// Defines how the bytes of buffers travel between two processes: `Driver` (one per agent and kind of channel),
/// `Channel` (one end of a device pair on a link), and the interfaces that a link lends to a channel (`Wire`,
/// `Outgoing`, `Sink`).
///
/// Life of one buffer:
/// - The sender *offers* the buffer and gets a *ticket*, which rides in the header of the buffer's message.
/// - The receiver reads the header and *pulls* the buffer into a *sink*.
/// - The receiver's acknowledgement *releases* the sender's storage.
///
/// A channel needs no message of its own for this, and no offer waits for a peer or a device.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/bytes.h"
#include "base/file_descriptor.h"
#include "base/status.h"
#include "channels/buffer.h"

namespace tensorferry {

class Channel;
class Copier;
class OneSided;
class SharedState;

/// Numbers the control messages of one direction of a link, from 1.
using ControlId = std::uint64_t;

/// File descriptors that travel with a control message (unix sockets only).
using Descriptors = std::vector<FileDescriptor>;

/// Tells the receiver how to fetch one buffer. Only the two ends of the channel that made it interpret `opaque`.
struct Ticket {
  static constexpr std::size_t max_bytes = 512;  // of `opaque`

  std::uint64_t bytes = 0;  // the buffer's size
  Bytes opaque;
  ControlId after = 0;  // the receiver needs this control message, and those before it, first; 0: none
  /// If true, the sender needs to learn of `consumed` (Channel::acknowledged). If false, the offer ends without an
  /// answer.
  bool acknowledge = false;
};

/// The reason why a channel cannot serve a buffer or a device pair. `explain()` prints it.
struct Refusal {
  std::string reason;
  bool passing = false;  // no warning: the cause ends soon (memory is being prepared), or another channel fits better
};
using Offer = std::variant<Ticket, Refusal>;

/// How the receiver gets the bytes of a buffer:
/// - `by_value`: the receiver gets bytes of its own.
/// - `shared`: both sides see the same bytes. The buffer lies in memory that this process made for sharing
///   (channels/region.h). The channel refuses the buffer if it cannot share it.
/// - `frozen`: both sides see the same bytes, and no process can write them any more. A page becomes the receiver's own
///   when the receiver writes there. If the channel cannot share the memory, the bytes go by value.
enum class Sharing : std::uint8_t { by_value, shared, frozen };

/// Gives one pulled buffer its place at the receiver. Never waits. A `pull` makes one successful call to one of the two
/// functions, or none if it fails. The same holds for an empty buffer, which needs no address.
class Sink {
 public:
  /// Returns memory for `bytes` bytes, from the receiver's pool or the caller's `out=`. Returns nullopt if there is
  /// none; the pull then fails with ResourceExhausted. `bytes` is a number from the peer: check it against a bound
  /// before allocating.
  virtual std::optional<Buffer> reserve(std::size_t bytes) = 0;
  /// Takes over memory that the channel already holds. If it returns false, the channel calls reserve() and copies. If
  /// the memory is shared, the channel instead fails the pull with ChannelUnavailable.
  virtual bool adopt(Buffer buffer) = 0;
  /// Returns whether adopt() takes memory.
  [[nodiscard]] virtual bool adopts() const { return true; }

 protected:
  ~Sink() = default;
};

/// The message under construction, whose buffers are being offered.
class Outgoing {
 public:
  /// Returns whether bytes can follow this message's frame on its stream.
  [[nodiscard]] virtual bool appends() const = 0;
  /// Sends `buffer` (never an empty one) directly behind the frame, after the buffers appended before. `written` runs
  /// when the source is no longer read; if the message is never sent, it runs with an error. Call it only if
  /// `appends()`.
  virtual void append(Buffer buffer, Completion written) = 0;
  /// Returns whether this is the last channel that the agent asks for this buffer. If so, the channel carries it even
  /// if that is slow.
  [[nodiscard]] virtual bool last_resort() const = 0;
  /// Returns whether a channel that precedes this one in the pair's order will probably carry later buffers: it is
  /// being probed, or refused this buffer in passing. Then it does not pay to make anything for later buffers.
  [[nodiscard]] virtual bool for_now() const { return false; }
  /// Returns whether the buffer describes the other buffers of this message (docs/protocol.md, "Spilled"). Those may be
  /// on the bulk connection already, where the receiver reads nothing until it knows them. So if the buffer can be
  /// appended, it must not go on the bulk connection behind them, however large it is.
  [[nodiscard]] virtual bool leads() const { return false; }
  /// Copies `from` to `to` by `copier`, together with the message's other copies, before the message is sent: many
  /// small copies together are worth a second thread. Until then the agent keeps the source and `owner`, which owns
  /// `to`; if the ticket is withdrawn, nothing is copied. False: the channel copies by itself.
  virtual bool copy_later(Copier& copier, std::byte* to, ByteView from, const Owner& owner) {
    (void)copier, (void)to, (void)from, (void)owner;
    return false;
  }

 protected:
  ~Outgoing() = default;
};

/// The functions of a link that one of its channels uses. Valid from `Driver::open` until the channel is destroyed.
///
/// Each completion handed to the wire (here and to `Outgoing::append`) may be empty, else it runs exactly once: when
/// the work is done, or with an error when the link has ended, before or after `Channel::close`. When it runs, the wire
/// no longer touches the buffer. Only the wire knows when that is, so a channel never completes early an operation that
/// the wire holds.
///
/// A completion runs on any thread, possibly inside the call itself, with no lock of the link held. A wire that
/// completes inside the call uses `complete()` (channels/completion.h), so that chains of operations do not recurse
/// without bound.
class Wire {
 public:
  /// Sends a small message to the channel's other end (`Channel::control` there), in order with other control messages.
  /// Any thread may call it, also while holding locks, because it only queues. If the link is not a unix socket and so
  /// cannot pass descriptors, it drops them and sends the message without them.
  virtual ControlId control(Bytes message, Descriptors descriptors) = 0;

  /// Receives the bytes behind the frame that is being read. Call it only inside `pull` or `discard`, in the order in
  /// which the sender appended. `destination.bytes` gives their number. If `destination.data` is null, the wire reads
  /// and drops them.
  virtual void read(Buffer destination, Completion landed) = 0;

  /// Sends `buffer` on a connection of the link that carries bulk data alone, so that no message waits behind it.
  /// `sequence` names it to the other end: unique within the channel, and counting up (concurrent offers may call this
  /// slightly out of order). `written` runs when the source is no longer read.
  virtual void send_bulk(std::uint64_t sequence, Buffer buffer, Completion written) = 0;
  /// Receives the bytes that the other end sent under `sequence`. The call may come before or after the bytes.
  /// `destination` is as for `read`. Completes with ProtocolError if the other end sent another number of bytes, or if
  /// the sequence was received before.
  virtual void receive_bulk(std::uint64_t sequence, Buffer destination, Completion landed) = 0;

  /// Returns whether a large buffer gets to the other end sooner as several buffers of bulk data: they go over several
  /// networks side by side, and the other end can put them together.
  [[nodiscard]] virtual bool splits_bulk() const { return false; }

  /// Ends the probe that `open` began: Ok, or the reason why the pair cannot be used. May be called inside `open`. The
  /// channel calls it again if that changes: with an error if a ready pair can carry no more (tickets under way are
  /// still pulled then), with Ok if a later probe of a pair that had failed succeeds.
  virtual void ready(Status probed) = 0;

  /// Returns false if this agent must share no memory with its peers. A channel that can work without shared memory
  /// then does so.
  [[nodiscard]] virtual bool may_share_memory() const { return true; }

  /// Returns whether control messages can carry descriptors to this peer.
  [[nodiscard]] virtual bool passes_descriptors() const { return true; }

  /// Returns the peer's name, for errors.
  [[nodiscard]] virtual std::string_view peer() const = 0;

  /// Returns what this link's channels share, for all device pairs and drivers (channels/shared_state.h). A driver
  /// keeps there what a link needs once, such as queue pairs. Null: the channel shares nothing.
  ///
  /// What is shared can reach its counterpart at the peer by the control messages of any channel that uses it. The two
  /// ends may open their channels in any order: a message to a channel that is not open yet opens it first.
  [[nodiscard]] virtual SharedState* shared() { return nullptr; }

  /// Another channel of this link, by which a channel sends bytes that it has staged in host memory.
  struct Carrier {
    Channel* channel = nullptr;  // valid until the channel that asked is destroyed
    std::string_view name;
  };
  /// Returns the link's first usable channel from CPU to CPU whose driver carries_staged(). Null: there is none, so the
  /// bytes go as bulk data. The first call opens these channels. The caller passes each ticket to its other end, which
  /// pulls from the carrier of that name; its answer that the bytes are read goes to Channel::acknowledged.
  [[nodiscard]] virtual Carrier carrier() { return {}; }
  /// Returns the carrier of this name, by which the peer sends, usable or not. Null: this end does not have it.
  [[nodiscard]] virtual Carrier carrier_named(std::string_view name) {
    (void)name;
    return {};
  }
  /// Counts bytes of this channel that a carrier has taken.
  virtual void carried(std::string_view carrier, std::uint64_t sent, std::uint64_t received) {
    (void)carrier, (void)sent, (void)received;
  }

 protected:
  ~Wire() = default;
};

/// Moves the bytes of buffers between one local and one remote device over a link.
///
/// Threads: any thread may call any function at any time, from completions too; `close` may overtake other calls.
///
/// Completions run exactly once. If the work is done when the function returns, they run on the caller's thread:
/// `released` may run inside `offer`, and `landed` inside `pull`. Otherwise they run on a thread of the agent or of the
/// wire. They run through `complete()`, never under a lock of the channel, and they do not throw.
///
/// Order: none between buffers.
///
/// Errors go to completions; no function throws for an action of the peer. A ProtocolError says that the peer broke the
/// protocol: the link is no longer usable, and the agent closes it.
///
/// Each ticket ends exactly once: pulled, discarded, or withdrawn. The owner destroys a channel after `close`, when no
/// call to it is running. Completions may still run after that.
class Channel {
 public:
  virtual ~Channel() = default;

  /// Makes `buffer` fetchable and returns the ticket by which the peer fetches it. If this channel cannot carry it,
  /// returns the reason; the caller then tries the pair's next channel. Never waits for the peer or for a device.
  ///
  /// The channel keeps `buffer.owner` until `released` has run. `released` runs when the source is no longer read: the
  /// peer acknowledged, the bytes are copied, or the channel closed. On a refusal the channel drops `released` without
  /// running it.
  ///
  /// The bytes may be under way when this returns, before the message that carries the ticket. The caller sends the
  /// message or withdraws the ticket soon, because later bytes may wait behind these. With `shared` the caller keeps
  /// `buffer.owner` until it has done so: the channel reads no bytes, so `released` may have run inside the call, and
  /// the receiver's hold begins when it pulls.
  virtual Offer offer(const Buffer& buffer, Sharing sharing, Outgoing& message, Completion released) = 0;

  /// Offers host buffers that go by value as one bundle (channels/bundle.h), with one ticket of the bundle's size. The
  /// other end pulls it like any other ticket. None of `parts` is empty. If the channel refuses, the agent offers the
  /// parts one by one and does not report the reason.
  virtual Offer offer_bundle(std::span<const Buffer* const> parts, Outgoing& message, Completion released) {
    (void)parts, (void)message, (void)released;
    return Refusal{"carries one buffer at a time", true};
  }

  /// Fetches a buffer into `sink`, which the caller keeps until `landed` has run. `landed` runs when the bytes are
  /// usable in the order of the sink's stream. `consumed` runs when the source is no longer read, and never before the
  /// bytes are safe; the agent then tells the sender, also after an error. An error runs both. After `landed` has run
  /// with an error, the channel no longer writes the sink's memory. `ticket` need not outlive the call.
  virtual void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) = 0;

  /// Returns whether pull() into `sink` copies the bytes on the calling thread. The agent then pulls a large buffer on
  /// a thread that reads no messages, and outside the executor.
  [[nodiscard]] virtual bool copies_into(const Sink& sink) const {
    (void)sink;
    return false;
  }

  /// Receiver: ends a ticket that will not be pulled. If the ticket asks for an acknowledgement, the agent sends it as
  /// for a consumed one. A malformed ticket is ignored, because the peer's next bytes will be malformed too. A channel
  /// that keeps nothing for a ticket at the receiver need not override it.
  virtual void discard(const Ticket& ticket) { (void)ticket; }
  /// Sender: the ticket was never sent, so no peer will pull it. Ends the offer: if `released` has not run, it runs as
  /// soon as nothing reads the source. Does nothing for an offer that has already ended, by itself or by `close`.
  virtual void withdraw(const Ticket& ticket) = 0;
  /// Sender: the peer has acknowledged `consumed` for a ticket. Ends the offer like `withdraw`.
  virtual void acknowledged(const Ticket& ticket) { withdraw(ticket); }

  /// Runs the completions of work that is done by now, if the channel would otherwise notice it a little later, as with
  /// a GPU's copies. The agent calls it before it sends a message that can carry acknowledgements. A thread that waits
  /// for a reply whose buffers are landing calls it again and again for a while, if `progresses()`. Never waits.
  virtual void progress() {}
  /// Returns whether pulls are under way whose end progress() notices sooner than the channel's own thread, which has
  /// to wake first.
  [[nodiscard]] virtual bool progresses() const { return false; }

  /// Returns by what this end reads and writes memory of the peer without the peer's threads; null if this channel
  /// cannot. It may be kept longer than the channel.
  [[nodiscard]] virtual std::shared_ptr<OneSided> one_sided() { return nullptr; }

  /// Handles a control message from the other end. The agent calls it in order, on a reading thread. A channel that
  /// sends none need not override it.
  virtual void control(ByteView message, Descriptors descriptors) { (void)message, (void)descriptors; }

  /// Returns what explain() prints about a usable pair: the link between the devices, and the GB/s that were measured.
  /// "" prints nothing.
  [[nodiscard]] virtual std::string describe() const { return {}; }

  /// Ends the channel, because its link has ended. Completes with `status` (an error) every operation that the channel
  /// holds. An operation that the wire holds, or whose bytes are being copied now, completes later, when its memory is
  /// no longer touched. Later calls fail or refuse at once. Never waits; a second call does nothing.
  virtual void close(Status status) noexcept = 0;
};

struct DevicePair {
  Device local;
  Device remote;
  auto operator<=>(const DevicePair&) const = default;
};

/// One kind of channel in one agent. The registry (channels/registry.h) makes drivers; a driver opens channels.
class Driver {
 public:
  virtual ~Driver() = default;

  /// Returns the name, such as "basic", that is used in options, frames, counters and explain().
  [[nodiscard]] virtual std::string_view name() const = 0;

  /// Returns the bytes by which a peer decides whether it reaches `device` with this driver. Returns a Refusal if this
  /// process cannot use `device` with it.
  virtual std::variant<Bytes, Refusal> descriptor(Device device) = 0;

  /// Returns nullopt if the two descriptors fit, otherwise the reason. Both ends call it and come to the same decision.
  /// `theirs` is bytes from a peer: parse it with a Reader.
  virtual std::optional<Refusal> reaches(ByteView mine, ByteView theirs) = 0;

  /// Returns true if the pair needs no probe. The first message may then already use it, and the other end opens at its
  /// first ticket or control message.
  [[nodiscard]] virtual bool immediate() const { return false; }

  /// Returns true if peers map memory of this process. An agent that must share no memory leaves such drivers out.
  [[nodiscard]] virtual bool shares_memory() const { return false; }

  /// Returns true if both processes must belong to one user. The link asks the kernel for the peer's user and leaves
  /// the driver out if it is another one, even if the descriptors name the same user.
  [[nodiscard]] virtual bool within_one_user() const { return shares_memory(); }

  /// Returns true if bytes in host memory travel better by this driver's channels than by the link's connections, and
  /// no thread of either process copies them: a network card moves them. Other channels may then use it
  /// (Wire::carrier).
  [[nodiscard]] virtual bool carries_staged() const { return false; }

  /// Opens one end of a pair; never returns null. Never blocks: it probes the pair for real (maps a nonce, reads a
  /// word) and reports through `wire.ready`. Both devices of `pair` have descriptors, and they fit.
  virtual std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) = 0;
};

}  // namespace tensorferry
