/// The two rings of a link, one for each direction of calling through shared memory, as request sources of the pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "agent/pool/pool.h"
#include "agent/transport/call_ring.h"
#include "agent/transport/doorbell.h"
#include "agent/transport/oversubscribed_wait.h"
#include "base/bytes.h"
#include "base/mutex.h"
#include "base/spin.h"
#include "base/status.h"

namespace tensorferry {

/// A link, as its rings see it. Threads: any.
class RingLink {
 public:
  [[nodiscard]] virtual bool closed() const noexcept = 0;
  /// Ends the link.
  virtual void fail(const Status& why) = 0;
  /// Returns whether the handler of the function with this number needs the executor, or may.
  [[nodiscard]] virtual bool needs_executor(std::uint32_t function) const = 0;
  /// Handles a request that was copied out of the peer's ring. An error must end the link.
  virtual Status on_ring_request(ByteView bytes, SlotId slot) = 0;
  /// Takes the reply in a slot of the done list.
  virtual void on_ring_reply(SlotId slot) = 0;

 protected:
  ~RingLink() = default;
};

/// The callee's end: takes the peer's requests, and answers into the ring's slots. Thread-safe.
class IncomingRing final : public RequestSource {
 public:
  IncomingRing(std::weak_ptr<RingLink> link, std::shared_ptr<CallRing> calls, std::shared_ptr<Doorbell> caller)
      : link_(std::move(link)), calls_(std::move(calls)), caller_(std::move(caller)) {}

  [[nodiscard]] bool empty() const override { return held_.load(std::memory_order_relaxed) || calls_->empty(); }
  [[nodiscard]] bool needs_executor() override;
  bool serve_one() override;
  /// Makes the ring look empty, or ends that. The caller then rings the pool's doorbell.
  void hold(bool held) { held_.store(held); }
  [[nodiscard]] int peer_cpu() const override { return peer_cpu_.load(std::memory_order_relaxed); }

  /// Tells the caller that this side serves no more requests.
  void end(CallRing::Ended how) { calls_->end(how); }
  /// Puts a reply into `slot`, and rings the caller's doorbell if the slot is watched. False: the caller has given up,
  /// and the reply must go by socket, so that the tickets in it end.
  bool answer(SlotId slot, ByteView frame);
  /// Tells the caller that the reply comes by socket. Call it before the reply is sent there.
  void answer_by_socket(SlotId slot);
  /// Returns whether the caller has given the call up.
  [[nodiscard]] bool abandoned(SlotId slot) const { return calls_->state(slot) == CallRing::State::abandoned; }

 private:
  const std::weak_ptr<RingLink> link_;
  const std::shared_ptr<CallRing> calls_;
  const std::shared_ptr<Doorbell> caller_;  // the caller's
  std::atomic<int> peer_cpu_{-1};
  std::atomic<bool> held_{false};
};

/// The caller's end: puts requests in. As a request source it gives the pool the replies that no thread waits for.
/// Thread-safe.
class OutgoingRing final : public RequestSource {
 public:
  OutgoingRing(std::weak_ptr<RingLink> link, std::shared_ptr<CallRing> of, std::shared_ptr<Doorbell> callee)
      : memory(std::move(of)), link_(std::move(link)), callee_(std::move(callee)) {}

  [[nodiscard]] bool empty() const override { return !memory->any_done(); }
  [[nodiscard]] bool needs_executor() override { return false; }
  bool serve_one() override;

  /// Puts a request in, and rings the callee's doorbell. False: no room.
  bool send(SlotId slot, ByteView frame);

  const std::shared_ptr<CallRing> memory;
  Spin spin;                          // for a thread that waits for a reply
  OversubscribedWait oversubscribed;  // for these threads when they outnumber the CPUs

 private:
  const std::weak_ptr<RingLink> link_;
  const std::shared_ptr<Doorbell> callee_;  // the callee's
  Mutex collect_mutex_;                     // one thread at a time takes from the done list
};

}  // namespace tensorferry
