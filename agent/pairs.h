/// The channels of one link: negotiated for each pair of devices, chosen for each buffer; what becomes of the buffers
/// of a message on its way out and in.
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
#include "agent/landing.h"
#include "agent/templates.h"
#include "agent/transport/frame_stream.h"
#include "agent/wire/frame.h"
#include "channels/channel.h"

namespace tensorferry {

/// A host buffer of up to so many bytes travels inside the frame.
inline constexpr std::size_t inline_bytes = 4096;

/// A message's host buffers of up to so many bytes each travel together where there are several: a bundle holds up to
/// so many bytes, which a receiver keeps as long as it keeps one of its parts.
inline constexpr std::size_t bundled_bytes = std::size_t{64} << 10;
inline constexpr std::size_t bundle_bytes = std::size_t{1} << 20;

/// Threads: any, but for receive() and what runs inside it, which is the stream's reader.
class Pairs final {
 public:
  explicit Pairs(Link& link);
  ~Pairs();
  /// After close(), when nobody else uses the link. Channels may use it until then, from threads of their own.
  void destroy_channels();

  /// The first hello of the peer says what it has. Later ones change nothing.
  void meet(const wire::Hello& hello);
  [[nodiscard]] bool met() const;

  struct Built {
    Bytes frame;
    std::vector<FrameStream::Part> trailing;
  };
  /// Set where `message` needs a channel that is still being probed (the required one, or one that hands shared memory
  /// over), and build() would fail for what a moment may settle. The number is for when_probed(). Where there is
  /// neither this costs nothing.
  [[nodiscard]] std::optional<std::uint64_t> probing(Message& message, const std::string& require,
                                                     const Placement& placement);
  /// Runs `job` once, on a thread of the pool, as soon as another probe has ended than those that probing() knew of; on
  /// this thread where the link has ended, or the thread that ends it.
  void when_probed(std::uint64_t known, UniqueFunction<void()> job);
  /// Offers the buffers and writes the frame. `held` is kept until every buffer's source has been read.
  /// ChannelUnavailable: no channel carries one of them (says which and why); nothing stays offered then.
  /// InvalidArgument: `placement` names a device that the peer does not have.
  Result<Built> build(wire::Header header, Bytes extensions, Message message, const std::string& require,
                      const Placement& placement, const std::shared_ptr<void>& held);
  /// The peer has read these sources.
  void acknowledged(const std::vector<std::uint64_t>& releases);

  /// Fetches the buffers of a frame; `arrived` runs once, perhaps before the return. `into`: where they should land.
  /// `stream`: whose frame it is; null where it came through shared memory, behind which no bytes stand.
  void receive(FrameStream* stream, const wire::Frame& frame, const std::vector<Buffer>& into,
               Landing::Arrived arrived);
  /// Ends the tickets of a message that nobody waits for any more, and drops its bytes.
  void discard(FrameStream* stream, const wire::Frame& frame);
  /// Acknowledgements that wait to go; at most `most`. Those of templates have time until the next message.
  std::vector<std::uint64_t> take_releases(std::size_t most, bool of_templates = false);

  Status on_control(std::uint64_t id, ByteView payload, Descriptors descriptors);
  /// A buffer follows on the bulk connection; hold: nobody has asked for it yet.
  Result<FrameSink::Taken> on_bulk(FrameStream& stream, const wire::Header& header);

  /// Where a buffer of a message lands; InvalidArgument as for build.
  Result<Device> arrival_of(Device source, Destination destination, const Placement& placement);
  Result<Route> explain(Device local, const Placement& placement, std::size_t bytes);
  void close(const Status& status);

 private:
  class Slot;    // one channel of one pair: its Wire (pairs_slot.h)
  struct Draft;  // a message that is being built: its Outgoing
  struct Offered {
    Slot* slot;
    Ticket ticket;
  };
  struct Way;
  struct BulkRead {
    Buffer destination;
    Completion landed;
  };
  using SlotKey = std::pair<std::size_t, DevicePair>;  // our driver, pair

  ControlId control(Slot& slot, std::uint8_t operation, ByteView bytes, Descriptors descriptors);
  void receive_bulk(std::uint32_t code, std::uint64_t sequence, BulkRead read);
  const Way& way(DevicePair pair);
  Slot* open(std::size_t driver, DevicePair pair);
  Status place(Message& message, const Placement& placement);
  wire::Template shorten(Message& message, Bytes& extensions);
  Result<Bytes> payload_of(const wire::Template& as, ByteView bytes);
  struct Plan;
  [[nodiscard]] Plan plan(const Message& message) const;
  Result<Built> attempt(wire::Header header, const Bytes& extensions, const Message& message, const Plan& plan,
                        const std::string& require, const std::shared_ptr<void>& held, bool spill);
  bool offer_bundle(Draft& draft, const Message& message, const std::vector<std::uint32_t>& bundle,
                    const std::string& require, const std::shared_ptr<void>& held);
  void record(Draft& draft, wire::BufferRecord record, Slot* slot, Ticket ticket);
  Status offer(Draft& draft, const Buffer& buffer, Device destination, Sharing sharing, const std::string& require,
               const std::shared_ptr<void>& held);
  void withdraw(Draft& draft);
  void pull(const wire::BufferRecord& record, BufferSink& sink, const std::shared_ptr<Landing>& landing);
  /// Pulls when that control message has come; with an error where it never will.
  void pull_when(ControlId after, std::function<void(const Status&)> pull);
  std::shared_ptr<Landing> land(const std::vector<wire::BufferRecord>& records, Bytes payload,
                                const std::vector<Buffer>& into, Landing::Arrived arrived, bool spill = false);
  void land_spilled(Received spill, const wire::Template& as, const std::vector<Buffer>& into,
                    Landing::Arrived arrived);
  /// The slot that a peer means; opens it where the peer was first. Null: no such driver, or it does not reach.
  Slot* slot_of_peer(std::uint8_t driver, DevicePair theirs);
  Slot* slot_of_code(std::uint32_t code);
  void want_release(std::uint64_t id);
  void settle();
  void probe_ended();
  void warn_once(const std::string& about, const std::string& line);

  Link& link_;
  Engine& engine_;
  std::mutex open_mutex_;  // one thread opens channels at a time; taken before the others

  mutable std::mutex mutex_;  // guards what follows; never held across a call of a channel's
  bool met_ = false;
  bool bundles_ = false;    // the peer reads them
  bool templates_ = false;  // likewise
  bool closed_ = false;
  Status status_;
  std::vector<wire::Hello::Driver> theirs_;
  std::vector<Device> their_devices_;
  std::map<SlotKey, std::unique_ptr<Slot>> slots_;
  struct Way {                                       // one pair's channels, in order of priority
    std::vector<std::pair<std::string, Slot*>> all;  // null: does not reach
    std::map<std::string, std::string> reasons;      // of those
    std::vector<Slot*> slots;
  };
  std::map<DevicePair, Way> ways_;
  SentTemplates sent_templates_;  // guards itself, like the next one
  ReceivedTemplates received_templates_;
  std::map<std::uint64_t, Offered> offered_;
  std::uint64_t next_release_ = 1;
  std::atomic<int> unconsumed_{0};  // tickets that were pulled, and whose sender waits for the acknowledgement
  std::vector<std::uint64_t> releases_, template_releases_;
  std::mutex control_mutex_;  // taken before mutex_: control messages leave in the order of their ids
  ControlId controls_sent_ = 0;
  ControlId controls_received_ = 0;
  std::vector<std::pair<ControlId, std::function<void(const Status&)>>>
      after_;  // pulls that wait for a control message
  std::uint64_t probes_ended_ = 0;
  std::vector<UniqueFunction<void()>> after_probe_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, BulkRead> bulk_reads_;
  std::set<std::string> warned_;
};

}  // namespace tensorferry
