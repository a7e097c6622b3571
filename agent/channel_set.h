/// The channels of one link. Negotiates them for each pair of devices, chooses one for each buffer, offers the buffers
/// of outgoing messages, and pulls the buffers of incoming ones.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "agent/engine.h"
#include "agent/incoming_message.h"
#include "agent/transport/frame_stream.h"
#include "agent/wire/frame.h"
#include "base/mutex.h"
#include "channels/channel.h"

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
  explicit ChannelSet(Link& link);
  ~ChannelSet();
  /// Destroys the channels. Call it after close(), when no other thread uses the link; until then channels may use the
  /// link from threads of their own.
  void destroy_channels();

  /// Learns the peer's devices, drivers and features from its first hello. Later hellos change nothing.
  void meet(const wire::Hello& hello);
  /// Returns whether the peer's first hello has come.
  [[nodiscard]] bool met() const;

  /// A frame to send, and the buffers behind it.
  struct Built {
    Bytes frame;
    std::vector<FrameStream::Part> trailing;
    int channel = -1;  // that carries the first buffer, by counter of Engine::bytes_sent; -1: there are no buffers
  };
  /// Returns a number for when_probed() if `message` needs a channel that is still being probed: the channel that
  /// `require` names, or one that hands over shared memory. build() could then fail although it will succeed after the
  /// probe. Costs nothing for a message that has neither. May decide the buffers' destinations in `message`.
  [[nodiscard]] std::optional<std::uint64_t> probing(Message& message, const std::string& require,
                                                     const Placement& placement);
  /// Runs `job` once, on a pool thread, when a probe has ended after probing() returned `known`. If the link has ended,
  /// runs it at once on the calling thread; if the link ends meanwhile, on the thread that ends it.
  void when_probed(std::uint64_t known, UniqueFunction<void()> job);
  /// Offers the buffers and writes the frame. Keeps `held` until every buffer's source has been read.
  /// ChannelUnavailable: no channel carries one of the buffers (the text says which and why); the offers of the others
  /// are withdrawn. InvalidArgument: `placement` names a device that the peer does not have.
  Result<Built> build(wire::Header header, Bytes extensions, Message message, const std::string& require,
                      const Placement& placement, const std::shared_ptr<void>& held);
  /// Ends the offers with these release ids: the peer has read their sources.
  void acknowledged(const std::vector<std::uint64_t>& releases);

  /// Pulls the buffers of a frame. `arrived` runs once, perhaps before the return. `into`: the caller's memory for
  /// them. `stream`: the stream that the frame came from, or null if it came by ring, where no bytes follow a frame. If
  /// the peer breaks the protocol, closes the link.
  void receive(FrameStream* stream, const wire::Frame& frame, const std::vector<Buffer>& into,
               IncomingMessage::Arrived arrived);
  /// Ends the tickets of a message without a receiver (its call has ended), and drops its bytes.
  void discard(FrameStream* stream, const wire::Frame& frame);
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
  /// Closes the channels and ends with `status` everything that waits for the peer. The first call counts.
  void close(const Status& status);

 private:
  class ChannelBinding;   // one channel of one device pair, and its Wire (channel_binding.h)
  struct MessageBuilder;  // a message that is being built, as the channels' Outgoing
  struct Offered {
    ChannelBinding* binding;
    Ticket ticket;
  };
  struct ChannelOrder;
  struct BulkRead {
    Buffer destination;
    Completion landed;
  };
  using BindingKey = std::pair<std::size_t, DevicePair>;  // index of this side's driver, device pair

  /// Sends a control message about the channel with this code. Any thread; under none of the locks here.
  ControlId control(std::uint32_t code, std::uint8_t operation, ByteView bytes, Descriptors descriptors);
  void receive_bulk(std::uint32_t code, std::uint64_t sequence, BulkRead read);
  const ChannelOrder& order(DevicePair pair);
  ChannelBinding* open(std::size_t driver, DevicePair pair);
  Status place(Message& message, const Placement& placement);
  struct Plan;
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
  /// Runs `pull` when the control message `after` has come; with an error if the link ends before.
  void pull_when(ControlId after, std::function<void(const Status&)> pull);
  std::shared_ptr<IncomingMessage> land(const std::vector<wire::BufferRecord>& records, Bytes payload,
                                        const std::vector<Buffer>& into, IncomingMessage::Arrived arrived,
                                        bool spill = false);
  void land_spilled(Received spill, const std::vector<Buffer>& into, IncomingMessage::Arrived arrived);
  /// Returns the binding that the peer names by its own driver number and device pair; opens the channel if the peer
  /// was the first to use it. Null: this end does not want that channel, and the peer is told so if `refuses`, once.
  /// ProtocolError: the peer has never announced such a driver, or not for that device.
  Result<ChannelBinding*> binding_of_peer(std::uint8_t driver, DevicePair theirs, bool refuses = true);
  Result<ChannelBinding*> binding_of_code(std::uint32_t code, bool refuses = true);
  /// Tells the peer that this end does not want a channel that the peer has opened.
  void refuse(const std::string& driver, DevicePair pair, const std::string& reason);
  void want_release(std::uint64_t id);
  void progress();
  void probe_ended();
  void warn_once(const std::string& about, const std::string& line);

  Link& link_;
  Engine& engine_;
  Mutex open_mutex_;  // one thread opens channels at a time; locked before the other mutexes

  mutable Mutex mutex_;  // guards the members below; never held across a call of a channel
  bool met_ = false;
  bool bundles_ = false;  // the peer reads bundles
  bool closed_ = false;
  Status status_;
  std::vector<wire::Hello::Driver> theirs_;
  std::vector<Device> their_devices_;
  std::map<BindingKey, std::unique_ptr<ChannelBinding>> bindings_;
  struct ChannelOrder {                                        // one pair's channels, in order of priority
    std::vector<std::pair<std::string, ChannelBinding*>> all;  // by name; null: does not reach
    std::map<std::string, std::string> reasons;                // why those with null do not reach
    std::vector<ChannelBinding*> bindings;                     // those that reach
  };
  std::map<DevicePair, ChannelOrder> orders_;
  std::map<std::uint64_t, Offered> offered_;
  std::uint64_t next_release_ = 1;
  std::atomic<int> unconsumed_{0};  // pulled tickets whose source is still being read, if their sender waits for it
  std::vector<std::uint64_t> releases_;
  Mutex control_mutex_;  // so that control messages leave in the order of their ids; locked before mutex_
  ControlId controls_sent_ = 0;
  ControlId controls_received_ = 0;
  std::vector<std::pair<ControlId, std::function<void(const Status&)>>>
      after_;  // pulls that wait for a control message
  std::uint64_t probes_ended_ = 0;
  std::vector<UniqueFunction<void()>> after_probe_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, BulkRead> bulk_reads_;
  std::set<std::string> warned_;
  std::set<std::uint32_t> refused_;  // codes of the channels that the peer has opened and this end does not want
};

}  // namespace tensorferry
