/// A link's two directions of calling through shared memory, as the pool sees them.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>

#include "agent/pool.h"
#include "agent/transport/call_ring.h"
#include "agent/transport/crowd.h"
#include "agent/transport/doorbell.h"
#include "agent/transport/spin.h"

namespace tensorferry {

class Link;

/// The callee's end: requests of the peer's. Its slots take the answers.
class IncomingRing final : public RequestSource {
 public:
  IncomingRing(std::weak_ptr<Link> link, std::shared_ptr<CallRing> calls, std::shared_ptr<Doorbell> caller)
      : link_(std::move(link)), calls_(std::move(calls)), caller_(std::move(caller)) {}

  [[nodiscard]] bool empty() const override { return calls_->empty(); }
  [[nodiscard]] bool needs_executor() override;
  bool serve_one() override;
  [[nodiscard]] int peer_cpu() const override { return peer_cpu_.load(std::memory_order_relaxed); }

  void end(CallRing::Ended how) { calls_->end(how); }
  /// False: the caller has given up, and the frame goes nowhere.
  bool answer(SlotId slot, ByteView frame);
  /// Tells the caller to look for the answer on the socket; before it is sent there.
  void answer_by_socket(SlotId slot);
  [[nodiscard]] bool abandoned(SlotId slot) const { return calls_->state(slot) == CallRing::State::abandoned; }

 private:
  const std::weak_ptr<Link> link_;
  const std::shared_ptr<CallRing> calls_;
  const std::shared_ptr<Doorbell> caller_;
  std::atomic<int> peer_cpu_{-1};
};

/// The caller's end. What the pool serves here are answers that nobody waits for.
class OutgoingRing final : public RequestSource {
 public:
  OutgoingRing(std::weak_ptr<Link> link, std::shared_ptr<CallRing> of, std::shared_ptr<Doorbell> callee)
      : calls(std::move(of)), link_(std::move(link)), callee_(std::move(callee)) {}

  [[nodiscard]] bool empty() const override { return !calls->any_done(); }
  [[nodiscard]] bool needs_executor() override { return false; }
  bool serve_one() override;

  /// False: no room.
  bool send(SlotId slot, ByteView frame);

  const std::shared_ptr<CallRing> calls;
  Spin spin;    // of threads that wait for an answer
  Crowd crowd;  // of the same, where they are many

 private:
  const std::weak_ptr<Link> link_;
  const std::shared_ptr<Doorbell> callee_;
  std::mutex collect_mutex_;
};

}  // namespace tensorferry
