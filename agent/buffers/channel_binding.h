/// One channel of one device pair of a link: the channel, the state of its probe at both ends, and its Wire.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "agent/buffers/bulk_reads.h"
#include "agent/buffers/channel_link.h"
#include "agent/buffers/outgoing_controls.h"
#include "agent/buffers/probes.h"
#include "base/mutex.h"
#include "base/text.h"
#include "channels/channel.h"
#include "channels/completion.h"
#include "channels/shared_state.h"

namespace tensorferry {

/// What the bindings of a link use, and the parts by which they reach the peer. They outlive the bindings.
struct WireParts {
  const ChannelSurroundings& around;
  OutgoingControls& controls;
  BulkReads& bulk_reads;
  Probes& probes;
  SharedState& shared;
};

/// Finds the channels of a link that carry staged bytes of other channels (Wire::carrier). Thread-safe.
class Carriers {
 public:
  virtual Wire::Carrier best() = 0;
  virtual Wire::Carrier named(std::string_view name) = 0;

 protected:
  ~Carriers() = default;
};

/// The Wire part is thread-safe. read() works only on the thread that is inside ChannelSet::receive or discard.
class ChannelBinding final : public Wire {
 public:
  enum class State : std::uint8_t { probing, usable, failed };
  /// The operation of a control frame: three of the pair's negotiation, and `message`, which carries a channel's
  /// message.
  enum class Control : std::uint8_t { open = 1, ready = 2, failed = 3, message = 4 };

  ChannelBinding(const WireParts& parts, Carriers& carriers, std::size_t driver, DevicePair pair, bool immediate)
      : parts_(parts),
        carriers_(carriers),
        driver_(driver),
        pair_(pair),
        immediate_(immediate),
        theirs_ready_(immediate) {}

  /// Returns `driver` and both devices in one number, as control and bulk frames carry it. It is coded from this side;
  /// the peer's code has its own driver number and the devices exchanged.
  [[nodiscard]] static std::uint32_t code(std::size_t driver, DevicePair pair) {
    return static_cast<std::uint32_t>(driver) << 24 | static_cast<std::uint32_t>(pair.local.type) << 20 |
           static_cast<std::uint32_t>(pair.local.index) << 12 | static_cast<std::uint32_t>(pair.remote.type) << 8 |
           pair.remote.index;
  }
  [[nodiscard]] std::uint32_t code() const { return code(driver_, pair_); }
  [[nodiscard]] std::size_t driver() const { return driver_; }
  [[nodiscard]] std::string_view name() const { return parts_.around.drivers[driver_].name(); }
  [[nodiscard]] State state() const {
    const std::lock_guard lock(mutex_);
    if (!mine_failed_.empty() || !theirs_failed_.empty()) return State::failed;
    return mine_ready_ && theirs_ready_ ? State::usable : State::probing;
  }
  [[nodiscard]] std::string reason() const {
    const std::lock_guard lock(mutex_);
    if (!mine_failed_.empty()) return mine_failed_;
    if (!theirs_failed_.empty()) return theirs_failed_;
    return mine_ready_ && theirs_ready_ ? "" : "its probe is under way";
  }
  /// Tells the peer that this end opens the channel.
  void tell_open() { send_control(Control::open, {}, {}); }
  /// The peer's probe has succeeded, perhaps after it had failed.
  void peer_ready() {
    {
      const std::lock_guard lock(mutex_);
      theirs_ready_ = true;
      theirs_failed_.clear();
    }
    parts_.probes.one_ended();
  }
  /// The peer's probe has failed, or its channel can carry no more.
  void peer_failed(std::string reason) {
    {
      const std::lock_guard lock(mutex_);
      theirs_failed_ = reason.empty() ? "its probe failed at the peer" : std::move(reason);
    }
    parts_.probes.one_ended();
  }

  ControlId control(Bytes message, Descriptors descriptors) override {
    return send_control(Control::message, message, std::move(descriptors));
  }
  void read(Buffer destination, Completion landed) override {
    if (reading == nullptr) {
      return complete(std::move(landed),
                      {Code::protocol_error, "the ticket names bytes behind the frame, but the frame has none"});
    }
    reading->read(std::move(destination), std::move(landed));
  }
  void send_bulk(std::uint64_t sequence, Buffer buffer, Completion written) override {
    wire::Header header;
    header.kind = wire::Kind::bulk;
    header.sequence = sequence;
    header.channel = code();
    header.trailing = buffer.bytes;
    parts_.around.link.send_bulk(wire::assemble(header, {}, {}, {}), {std::move(buffer), std::move(written)});
  }
  void receive_bulk(std::uint64_t sequence, Buffer destination, Completion landed) override {
    const auto added = parts_.bulk_reads.add({code(), sequence}, {std::move(destination), std::move(landed)});
    if (added == BulkReads::Added::waits) parts_.around.link.resume_bulk();
    if (added == BulkReads::Added::too_many) parts_.around.link.fail(BulkReads::too_many());
  }
  [[nodiscard]] bool splits_bulk() const override { return parts_.around.link.splits_bulk(); }
  void ready(Status probed) override {
    bool assumed = immediate_;
    {
      const std::lock_guard lock(mutex_);
      assumed = assumed && mine_failed_.empty();
      if (probed.ok()) mine_ready_ = true;
      mine_failed_ = probed.ok() ? "" : probed.what().empty() ? "its probe failed" : std::string(probed.what());
    }
    parts_.probes.one_ended();
    if (probed.ok() && assumed) return;  // the peer assumes it, so no connection is opened to say so
    send_control(probed.ok() ? Control::ready : Control::failed, view_of(probed.what().substr(0, 1024)), {});
  }
  [[nodiscard]] bool may_share_memory() const override { return parts_.around.shares_memory; }
  [[nodiscard]] bool passes_descriptors() const override { return parts_.around.link.local(); }
  [[nodiscard]] std::string_view peer() const override { return parts_.around.link.peer().name; }
  [[nodiscard]] SharedState* shared() override { return &parts_.shared; }
  [[nodiscard]] Carrier carrier() override { return carriers_.best(); }
  [[nodiscard]] Carrier carrier_named(std::string_view name) override { return carriers_.named(name); }
  void carried(std::string_view carrier, std::uint64_t sent, std::uint64_t received) override {
    parts_.around.counters.carried.add(name(), carrier, sent, received);
  }

  std::unique_ptr<Channel> channel;

  /// The stream whose frame this thread is handling, for read(); null outside and for frames from a ring.
  static inline thread_local FrameStream* reading = nullptr;

 private:
  ControlId send_control(Control operation, ByteView bytes, Descriptors descriptors) {
    return parts_.controls.send(code(), static_cast<std::uint8_t>(operation), bytes, std::move(descriptors));
  }

  const WireParts& parts_;
  Carriers& carriers_;
  const std::size_t driver_;
  const DevicePair pair_;
  const bool immediate_;
  mutable Mutex mutex_;
  bool mine_ready_ = false;
  bool theirs_ready_;
  std::string mine_failed_, theirs_failed_;  // why this end, or the peer's, carries nothing; "" if it can
};

}  // namespace tensorferry
