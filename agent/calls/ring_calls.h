/// The calls of a link whose requests went by the link's outgoing ring. Their replies come into slots of the ring; the
/// thread that waits for a call, or the pool, takes them out.
///
/// There is no ring until the peer has accepted one (open()). A call belongs to the ring while its `in_ring` is true.
///
/// Threads: any.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/call_state.h"
#include "agent/calls/rings.h"
#include "agent/transport/frame_stream.h"
#include "agent/wire/frame.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace tensorferry {

class Pool;

/// The calls of a link and the link itself, as the ring sees them. Threads: any.
class RingCallsOwner {
 public:
  [[nodiscard]] virtual bool link_closed() const noexcept = 0;
  /// Ends the link, and returns why it has ended: an earlier reason counts.
  virtual Status end_link(const Status& why) = 0;
  /// The peer has read the sources of these offers.
  virtual void acknowledged(const std::vector<std::uint64_t>& releases) = 0;
  /// Handles a reply; `stream` is null. An error must end the link.
  virtual Status on_reply(FrameStream* stream, const wire::Frame& frame) = 0;
  /// Ends a call with the link's error.
  virtual void fail(const std::shared_ptr<Call::State>& call, const Status& why) = 0;
  /// Returns the calls that have not ended.
  [[nodiscard]] virtual std::vector<std::shared_ptr<Call::State>> all() const = 0;

 protected:
  ~RingCallsOwner() = default;
};

class RingCalls final {
 public:
  /// All of them outlive this.
  RingCalls(RingCallsOwner& owner, const Pool& pool, const Clock& clock) : owner_(owner), pool_(pool), clock_(clock) {}

  /// Sends by `ring` from now on; called once.
  void open(std::shared_ptr<OutgoingRing> ring);
  [[nodiscard]] bool is_open() const noexcept { return open_.load(std::memory_order_acquire); }
  /// Returns the ring; only if it is open.
  [[nodiscard]] const std::shared_ptr<OutgoingRing>& ring() const noexcept { return ring_; }

  /// Puts a request into the ring. False: it must go by socket.
  bool send(const std::shared_ptr<Call::State>& call, ByteView frame);
  /// Waits until the call's slot has been answered, and takes the reply. False: interrupted, or `until` has passed.
  bool wait(Call::State& call, std::optional<Clock::time_point> until, const std::function<bool()>& interrupted);
  /// Spins for the reply of a call, and takes it; see Call::spin_wait. True: the call has ended.
  bool spin_wait(Call::State& call, std::chrono::nanoseconds at_least);
  /// Takes the call's reply if it has come.
  void poll(Call::State& call);
  /// Makes the callee ring this agent's doorbell when it answers the call.
  void expect_reply(Call::State& call);
  /// Takes the reply in a slot of the done list: the callee answered while no thread slept on the slot.
  void on_done(SlotId slot);
  /// Takes the replies that have come into slots and that no thread has taken yet. Called while the link ends.
  void take_all();
  /// Returns whether a thread has taken the call's reply out of its slot and is about to end the call.
  [[nodiscard]] bool taken(const Call::State& call) const;
  /// The call has ended: gives its slot up.
  void call_ended(const Call::State& call);
  /// Describes the call's slot for people; "" if the call is not in the ring.
  [[nodiscard]] std::string state_text(const Call::State& call) const;

 private:
  [[nodiscard]] bool answered(const Call::State& call) const;
  void take_as_waiter(Call::State& call);
  void take(const std::shared_ptr<Call::State>& call);
  Status read(const std::shared_ptr<Call::State>& call);
  Status read_or_say_why(const std::shared_ptr<Call::State>& call) noexcept;
  Status handle(const Call::State& call, ByteView reply);
  void give_up_slot(const Call::State& call);

  RingCallsOwner& owner_;
  const Pool& pool_;
  const Clock& clock_;
  std::shared_ptr<OutgoingRing> ring_;  // never changes once `open_` is true
  std::atomic<bool> open_{false};
  Mutex mutex_;
  std::vector<std::weak_ptr<Call::State>> calls_;  // by slot; under mutex_
};

}  // namespace tensorferry
