/// What carries the bytes of buffers between two processes: `Driver` (one a process and kind), `Channel` (one end of a
/// device pair on a link), and what a link lends to them (`Wire`, `Outgoing`, `Sink`).
///
/// Life of one buffer: the sender *offers* it and gets a *ticket*, which rides in the header of the message that the
/// buffer belongs to; the receiver reads the header and *pulls* into a *sink*; its acknowledgement *releases* the
/// sender's storage. No message of the channel's own is needed, and no offer waits for a peer or a device.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "channels/buffer.h"
#include "channels/bytes.h"
#include "channels/file_descriptor.h"
#include "channels/status.h"

namespace tensorferry {

/// Numbers the control messages of one direction of a link, from 1.
using ControlId = std::uint64_t;

/// File descriptors that go with a control message (unix sockets only).
using Descriptors = std::vector<FileDescriptor>;

/// What the receiver needs to fetch one buffer. Opaque to all but the channel that made it.
struct Ticket {
  static constexpr std::size_t max_bytes = 512;  // of `opaque`

  std::uint64_t bytes = 0;  // the buffer's size
  Bytes opaque;
  ControlId after = 0;  // this control message, and those before it, must have come first; 0: none
  /// The sender must hear of `consumed` (Channel::acknowledged); else the offer needs no answer.
  bool acknowledge = false;
};

/// Why a buffer or a device pair cannot be served. `explain()` prints the reason.
struct Refusal {
  std::string reason;
  bool passing = false;  // nothing to warn of: over soon (memory is being prepared), or others suit this buffer better
};
using Offer = std::variant<Ticket, Refusal>;

/// Values are values: `by_value` gives the receiver bytes of its own. `shared` hands over memory that this process made
/// to be shared (channels/region.h) so that both sides see the same bytes, and is refused where that cannot be.
/// `frozen` hands over memory that nobody can write any more, each page of which is the receiver's own when it writes
/// there; where that cannot be, the bytes go by value.
enum class Sharing : std::uint8_t { by_value, shared, frozen };

/// Where a pulled buffer goes; the receiver's end. Never waits. `pull` calls exactly one of the two with success, or
/// none; also for an empty buffer, which needs no address.
class Sink {
 public:
  /// Memory for `bytes` bytes (the receiver's pool, or the caller's `out=`); nullopt: there is none, the pull fails
  /// with ResourceExhausted. `bytes` is a peer's number: bound it before allocating.
  virtual std::optional<Buffer> reserve(std::size_t bytes) = 0;
  /// Takes over memory that the channel holds already. False: call reserve() and copy; where the memory is shared, fail
  /// the pull with ChannelUnavailable.
  virtual bool adopt(Buffer buffer) = 0;

 protected:
  ~Sink() = default;
};

/// The message that is being written while buffers are offered.
class Outgoing {
 public:
  /// Whether bytes can follow this message's frame on its stream.
  [[nodiscard]] virtual bool appends() const = 0;
  /// Sends `buffer` (never an empty one) right behind the frame, after those appended before. `written` runs when the
  /// source is read no more; with an error where the message is never sent. Only where `appends()`.
  virtual void append(Buffer buffer, Completion written) = 0;
  /// No other channel will be asked for this buffer: slowly is better than not at all.
  [[nodiscard]] virtual bool last_resort() const = 0;
  /// The buffer says what the others of this message are. Those may be on the bulk connection already, where nothing is
  /// read until they are known: however large, it must not go there behind them where it can be appended.
  [[nodiscard]] virtual bool leads() const { return false; }

 protected:
  ~Outgoing() = default;
};

/// What a link lends to one of its channels. Valid from `Driver::open` until the channel is destroyed.
///
/// Completions handed to it (here and to `Outgoing::append`) run exactly once: when the work is done, or with an error
/// when the link has ended, before or after `Channel::close`. Either way the wire touches the buffer no more by then:
/// only it knows when that is, so a channel never completes early what the wire holds. They run on any thread, inside
/// the very call included, with no lock of the link's held; a wire that completes inside the call does so by
/// `complete()` (channels/completion.h), so that chains of operations do not recurse without bound.
class Wire {
 public:
  /// Sends a small message to the channel's other end (`Channel::control` there), in order with other control messages.
  /// Any thread; may be called under the caller's locks (it queues). Descriptors that the link cannot pass, because it
  /// is no unix socket, are dropped, and the message comes without.
  virtual ControlId control(Bytes message, Descriptors descriptors) = 0;

  /// Receives the bytes behind the frame that is being read: only inside `pull` or `discard`, in the order in which the
  /// sender appended. `destination.bytes` says how many; `destination.data` null: reads and drops them.
  virtual void read(Buffer destination, Completion landed) = 0;

  /// Sends `buffer` on a connection of the link's that carries bulk data alone, so that no message waits behind it.
  /// `sequence` names it to the other end, once within the channel and counted up (threads that offer at once may come
  /// here a little out of order). `written`: the source is read no more.
  virtual void send_bulk(std::uint64_t sequence, Buffer buffer, Completion written) = 0;
  /// Receives what the other end sent under `sequence`; may come before or after the bytes. `destination` as for read.
  /// ProtocolError where the other end sent another number of bytes, or the sequence was received before.
  virtual void receive_bulk(std::uint64_t sequence, Buffer destination, Completion landed) = 0;

  /// Ends the probe that `open` began (may be called inside it): Ok, or why the pair falls away. Once; and again with
  /// an error where a pair that was ready can carry no more (tickets that are under way are pulled all the same).
  virtual void ready(Status probed) = 0;

  /// False: this agent must share no memory with its peers; a channel that can do without does.
  [[nodiscard]] virtual bool may_share_memory() const { return true; }

  /// "name of the peer", for errors.
  [[nodiscard]] virtual std::string_view peer() const = 0;

 protected:
  ~Wire() = default;
};

/// Moves the bytes of buffers between one local and one remote device over a link.
///
/// Threads: every function may be called from any thread at once, from completions too; `close` may overtake the
/// others. Completions run exactly once, on the caller's thread where the work is done on return (so `released` may run
/// inside `offer`, and `landed` inside `pull`), else on a thread of the agent's or of the wire's; never under a lock of
/// the channel's, and by `complete()`. They do not throw.
///
/// Order: none between buffers.
///
/// Errors reach completions; nothing here throws for what a peer did. A ProtocolError says that the peer broke the
/// rules: the link is of no more use, and the agent closes it.
///
/// Each ticket ends exactly once: pulled, discarded, or withdrawn. The owner destroys a channel after `close`, when no
/// call of it is running; completions may run later still.
class Channel {
 public:
  virtual ~Channel() = default;

  /// Makes `buffer` fetchable and returns what the peer needs to fetch it, or why this channel cannot carry it: the
  /// caller then tries the pair's next channel. `buffer.owner` is kept until `released` has run: when the source is
  /// read no more (the peer acknowledged, the bytes are copied, or the channel closed). On a refusal `released` is
  /// dropped unrun. Never waits for the peer or for a device.
  ///
  /// The bytes may be under way when this returns, before the message that carries the ticket is: send it or withdraw
  /// the ticket soon, for what comes later may stand behind them. With `shared` the caller keeps `buffer.owner` until
  /// then: nothing is read, so `released` may have run inside, and the receiver's hold begins when it pulls.
  virtual Offer offer(const Buffer& buffer, Sharing sharing, Outgoing& message, Completion released) = 0;

  /// The same for buffers of the host that go by value as one bundle (channels/bundle.h): one ticket, of the bundle's
  /// size, which the other end pulls like any other. None of `parts` is empty. A refusal says nothing: they are then
  /// offered one by one.
  virtual Offer offer_bundle(std::span<const Buffer* const> parts, Outgoing& message, Completion released) {
    (void)parts, (void)message, (void)released;
    return Refusal{"carries one buffer at a time", true};
  }

  /// Fetches a buffer into `sink`, which the caller keeps until `landed` ran. `landed`: the bytes are usable in the
  /// order of the sink's stream. `consumed`: the source is read no more, which the agent tells the sender, whatever the
  /// status; never runs before the bytes are safe. An error runs both. Once `landed` ran with an error the sink's
  /// memory is written no more. `ticket` need not outlive the call.
  virtual void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) = 0;

  /// Receiver: the ticket will not be pulled. The agent acknowledges it like a consumed one, where it asks for that.
  /// Where the ticket makes no sense this does nothing: what the peer sends next will not either.
  virtual void discard(const Ticket& ticket) = 0;
  /// Sender: the peer acknowledged `consumed` for a ticket, or the ticket was never sent (then nobody will pull it).
  /// Ends the offer: `released` runs if it has not, as soon as nothing reads the source. Either may come for an offer
  /// that has ended by itself or by `close`, and then does nothing.
  virtual void acknowledged(const Ticket& ticket) = 0;
  virtual void withdraw(const Ticket& ticket) = 0;

  /// A message is about to go, which can carry acknowledgements: runs the completions of what is done by now and would
  /// only be noticed a little later, as a GPU's copies are. Never waits.
  virtual void settle() {}

  /// A control message of the other end's; runs in order, on a reader's thread.
  virtual void control(ByteView message, Descriptors descriptors) = 0;

  /// What explain() says of a pair that carries: the link between the devices, and GB/s that were measured; "":
  /// nothing.
  [[nodiscard]] virtual std::string describe() const { return {}; }

  /// The link has ended. Completes with `status` (an error) what the channel holds, other than what the wire holds or
  /// what is being copied at this moment: that completes when its memory is touched no more. Later calls fail or refuse
  /// at once. Never waits; a second call does nothing.
  virtual void close(Status status) noexcept = 0;
};

struct DevicePair {
  Device local;
  Device remote;
  auto operator<=>(const DevicePair&) const = default;
};

/// What one kind of channel is in this process: what the registry holds.
class Driver {
 public:
  virtual ~Driver() = default;

  /// "basic": the name in options, tickets' frames, counters and explain().
  [[nodiscard]] virtual std::string_view name() const = 0;

  /// What a peer must know to decide whether it reaches `device` by this driver; a Refusal where this process cannot.
  virtual std::variant<Bytes, Refusal> descriptor(Device device) = 0;

  /// Whether the two descriptors fit; else why not. Both ends decide, the same way. `theirs` is a peer's bytes: parse
  /// them with a Reader.
  virtual std::optional<Refusal> reaches(ByteView mine, ByteView theirs) = 0;

  /// True: needs no probe, so the first message may already use it, and the other end opens at its first ticket or
  /// control message.
  [[nodiscard]] virtual bool immediate() const { return false; }

  /// True: peers map memory of this process's. An agent that must share none leaves such drivers out.
  [[nodiscard]] virtual bool shares_memory() const { return false; }

  /// One end of a pair, never null. Never blocks; probes for real (maps a nonce, reads a word) and reports through
  /// `wire.ready`. `pair` is one for which both descriptors were had and fit.
  virtual std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) = 0;
};

}  // namespace tensorferry
