/// The messages of one link and its channels: chooses a channel for each buffer, offers the buffers of outgoing
/// messages, and pulls the buffers of incoming ones. Its parts negotiate the channels (ChannelBindings), order control
/// messages (OutgoingControls, IncomingControls), find the destinations of bulk bytes (BulkReads), and keep what waits
/// for the end of a probe (Probes), for the peer's acknowledgement (OfferedBuffers), or to be acknowledged
/// (Acknowledgements).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "agent/buffers/acknowledgements.h"
#include "agent/buffers/bulk_reads.h"
#include "agent/buffers/channel_bindings.h"
#include "agent/buffers/channel_link.h"
#include "agent/buffers/incoming_controls.h"
#include "agent/buffers/incoming_message.h"
#include "agent/buffers/offered_buffers.h"
#include "agent/buffers/outgoing_controls.h"
#include "agent/buffers/probes.h"
#include "agent/reports.h"
#include "agent/transport/frame_stream.h"
#include "agent/wire/frame.h"
#include "base/mutex.h"
#include "base/spin.h"
#include "channels/channel.h"
#include "channels/shared_state.h"

namespace tensorferry {

/// A host buffer of up to this many bytes travels inside the frame.
inline constexpr std::size_t inline_bytes = 4096;

/// If a message has several host buffers of up to `bundled_bytes` each, they travel in bundles of up to `bundle_bytes`.
/// The bound on a bundle limits the memory that a receiver keeps as long as it keeps one of the parts.
inline constexpr std::size_t bundled_bytes = std::size_t{64} << 10;
inline constexpr std::size_t bundle_bytes = std::size_t{1} << 20;

/// Threads: any. The functions that handle an incoming frame (receive, discard, on_control, on_bulk) run on the thread
/// that has read the frame. Completions and callbacks run under none of the locks here.
class ChannelSet final {
 public:
  explicit ChannelSet(ChannelSurroundings around);
  ~ChannelSet();
  /// Destroys the channels. Call it after close(), when no other thread uses the link; until then channels may use the
  /// link from threads of their own.
  void destroy_channels() { bindings_.destroy_channels(); }

  /// See ChannelBindings.
  void meet(const wire::Hello& hello, std::optional<uid_t> uid) { bindings_.meet(hello, uid); }

  /// A frame to send, and the buffers behind it.
  struct Built {
    Bytes frame;
    std::vector<FrameStream::Part> trailing;
    int channel = -1;  // that carries the first buffer, by counter of AgentCounters; -1: there are no buffers
  };
  /// Returns a number for when_probed() if `message` needs a channel that is still being probed: the channel that
  /// `require` names, or one that hands over shared memory. build() could then fail although it will succeed after the
  /// probe. Costs nothing for a message that has neither. May decide the buffers' destinations in `message`.
  [[nodiscard]] std::optional<std::uint64_t> probing(Message& message, const std::string& require,
                                                     const Placement& placement);
  /// Runs `job` once, on a pool thread, when a probe has ended after probing() returned `known`. If the link has ended,
  /// runs it at once on the calling thread; if the link ends meanwhile, on the thread that ends it.
  void when_probed(std::uint64_t known, UniqueFunction<void()> job) { probes_.when_ended(known, std::move(job)); }
  /// Offers the buffers and writes the frame. Keeps `held` until every buffer's source has been read.
  /// ChannelUnavailable: no channel carries one of the buffers (the text says which and why); the offers of the others
  /// are withdrawn. InvalidArgument: `placement` names a device that the peer does not have.
  Result<Built> build(wire::Header header, Bytes extensions, Message message, const std::string& require,
                      const Placement& placement, const std::shared_ptr<void>& held);
  /// Ends the offers with these release ids: the peer has read their sources.
  void acknowledged(const std::vector<std::uint64_t>& releases);

  /// Decides whether the buffers of a spilled message are pulled, when its records have come. `bytes`: those of the
  /// payload and the buffers. An error discards the message, and goes to `arrived`.
  using Admit = UniqueFunction<Status(std::size_t bytes)>;
  /// Pulls the buffers of a frame. `arrived` runs once, perhaps before the return. `into`: the caller's memory for
  /// them. `stream`: the stream that the frame came from, or null if it came by ring, where no bytes follow a frame. If
  /// the peer breaks the protocol, closes the link. `admit`: as in Admit. Throws std::bad_alloc only before the first
  /// pull, and then may have dropped `arrived`.
  void receive(FrameStream* stream, const wire::Frame& frame, const std::vector<Buffer>& into,
               IncomingMessage::Arrived arrived, Admit admit = {});
  /// Ends the tickets of a message without a receiver (its call has ended), and drops its bytes. Pulls no buffer,
  /// except the one with the records of a spilled message.
  void discard(FrameStream* stream, const wire::Frame& frame);
  /// Lets channels complete pulls for which this thread waits (Channel::progresses), until `over` returns true or the
  /// spin limit has passed. On a machine with few CPUs it polls once: there a spinning thread takes the CPU of those
  /// that it waits for. Call it with no lock held.
  template <class Over>
  void progress_until(const Over& over) {
    auto channels = bindings_.channels();
    std::erase_if(channels, [](const Channel* each) { return !each->progresses(); });
    if (channels.empty()) return;
    const auto poll = [&] {
      for (auto* channel : channels) channel->progress();
      return over();
    };
    (void)(Spin::cpus_to_spare ? progress_spin_.until(poll) : poll());
  }
  /// Says what the buffers of this link wait for that have not arrived, for error texts: ": " and a list.
  [[nodiscard]] std::string awaited() const;
  /// Takes up to `most` acknowledgements that wait to be sent.
  std::vector<std::uint64_t> take_releases(std::size_t most);

  /// Handles a control frame, in the order of the ids. Then runs the pulls that waited for it. An error closes the
  /// link.
  Status on_control(std::uint64_t id, ByteView payload, Descriptors descriptors);
  /// Handles a bulk frame: reads its bytes into the registered destination. hold: no pull has registered one yet.
  Result<FrameSink::Taken> on_bulk(FrameStream& stream, const wire::Header& header);

  /// Returns the device on which a buffer of a message lands. InvalidArgument as for build().
  Result<Device> arrival_of(Device source, Destination destination, const Placement& placement);
  /// Lists the channels for a tensor on `local`; see RawAgent::explain. Opens them if needed.
  Result<Route> explain(Device local, const Placement& placement, std::size_t bytes);
  /// See RawAgent::one_sided.
  [[nodiscard]] std::shared_ptr<OneSided> one_sided(DevicePair pair);
  /// Closes the channels and ends with `status` everything that waits for the peer. The first call counts.
  void close(const Status& status);

 private:
  struct MessageBuilder;  // a message that is being built, as the channels' Outgoing
  struct Plan;

  Status place(Message& message, const Placement& placement);
  [[nodiscard]] Plan plan(const Message& message) const;
  Result<Built> attempt(wire::Header header, const Bytes& extensions, const Message& message, const Plan& plan,
                        const std::string& require, const std::shared_ptr<void>& held, bool spill);
  bool offer_bundle(MessageBuilder& builder, const Message& message, const std::vector<std::uint32_t>& bundle,
                    const std::string& require, const std::shared_ptr<void>& held);
  void record(MessageBuilder& builder, wire::BufferRecord record, ChannelBinding* binding, Ticket ticket);
  Status offer(MessageBuilder& builder, const Buffer& buffer, Device destination, Sharing sharing,
               const std::string& require, const std::shared_ptr<void>& held);
  void withdraw(MessageBuilder& builder);
  void pull(const wire::BufferRecord& record, BufferSink& sink, const std::shared_ptr<IncomingMessage>& message_in,
            std::vector<std::function<void()>>& copies);
  void copy_elsewhere(std::vector<std::function<void()>> copies);
  std::shared_ptr<IncomingMessage> land(const std::vector<wire::BufferRecord>& records, Bytes&& payload,
                                        const std::vector<Buffer>& into, IncomingMessage::Arrived&& arrived,
                                        bool spill = false);
  class ReadingFrom;
  struct SpilledMessage;
  void land_spilled(const Received& spill, SpilledMessage& message);
  void discard(const std::vector<wire::BufferRecord>& records);
  void want_release(std::uint64_t id);
  void warn_once(const std::string& about, const std::string& line);

  const ChannelSurroundings around_;
  OfferedBuffers offered_;
  Acknowledgements acknowledgements_;
  Spin progress_spin_;
  IncomingControls incoming_controls_;
  BulkReads bulk_reads_;
  Probes probes_;
  OutgoingControls outgoing_controls_;
  SharedState shared_;
  ChannelBindings bindings_;  // uses the four before it
  Mutex warned_mutex_;
  std::set<std::string> warned_;  // under warned_mutex_
};

}  // namespace tensorferry
