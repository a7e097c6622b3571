/// The requests of one link that this agent has taken in and not answered: their bounds, their order, their cancels.
///
/// A request is queued from begin() until start(): while its buffers land, while an earlier request of its order key
/// runs, and while all places for handlers are taken. What is queued is bounded, so a peer that sends without end
/// cannot grow this process: beyond the bounds begin() refuses the request. A queued request needs no place, so the
/// bounds cannot keep a nested call from running (see Pool).
///
/// Threads: any. No callback runs under the lock here.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "agent/wire/frame.h"
#include "base/clock.h"
#include "base/function.h"
#include "base/mutex.h"

namespace tensorferry {

struct CallRecord;

/// A request's place in the queue of its order key.
struct OrderTicket {
  Completion start;  // dispatches the request; set once it has landed, if earlier requests run still
};

/// A request that the callee has not answered yet.
struct IncomingRequest {
  std::atomic<bool> cancelled{false};
  std::atomic<bool> outlives_link{false};            // see Reply::outlive_link
  std::vector<UniqueFunction<void()>> on_cancelled;  // of Reply::on_cancelled; under the lock of IncomingCalls
  std::optional<Clock::time_point> deadline;
  std::uint32_t order = 0;
  std::shared_ptr<OrderTicket> order_ticket;  // null if order is 0
  // How far it has come, for the caller's status frames.
  std::atomic<wire::CallStatus::Stage> stage{wire::CallStatus::Stage::arriving};
  std::atomic<Clock::rep> received{0}, began{0};  // when the request came, and when its handler began
  std::atomic<std::uint32_t> busy_at_arrival{0};  // see wire::CallStatus
  std::atomic<std::uint32_t> function{0};         // its number; 0: not known
  std::shared_ptr<CallRecord> traced;             // null: no trace is recorded
  // One thread at a time uses these: the one that reads, lands, starts or ends the request.
  std::size_t bytes = 0;  // of payload and buffers, as long as they count
  bool started = false;
};

class IncomingCalls final {
 public:
  struct Bounds {
    std::size_t calls = 0;  // queued at a time
    std::size_t bytes = 0;  // of queued calls; a call of more goes when no other is queued
  };
  /// Requests that are not answered, queued or started. Only handlers that hold no thread while they run can come near.
  static constexpr std::size_t most_open = std::size_t{1} << 20;

  explicit IncomingCalls(Bounds bounds) : bounds_(bounds) {}

  /// Takes a request in. `bytes`: of its payload and of the buffers that its frame names. ProtocolError: a request with
  /// this id is open. ResourceExhausted: a bound is reached, and the text says which.
  Result<std::shared_ptr<IncomingRequest>> begin(std::uint64_t call, std::optional<Clock::time_point> deadline,
                                                 std::uint32_t order, std::size_t bytes);
  /// Counts `bytes` for a request, in place of those that it counted before: the frame of a spilled message does not
  /// say how many bytes its buffers have. Errors as begin().
  Status count(IncomingRequest& incoming, std::size_t bytes);
  /// Runs `start` now, or when all earlier requests of its order key have been answered.
  void when_in_order(const IncomingRequest& incoming, Completion start);
  /// The request's handler begins to run: it is queued no more.
  void start(IncomingRequest& incoming);
  /// Removes a request that has been answered or dropped, and starts the next request of its order key.
  void end(std::uint64_t call, IncomingRequest& incoming);

  /// Returns how far a request has come at `now`, without the counts of handlers.
  [[nodiscard]] wire::CallStatus status(std::uint64_t call, Clock::time_point now);

  /// Adds a callback of Reply::on_cancelled, or runs it at once if the request is cancelled already.
  void on_cancelled(IncomingRequest& incoming, UniqueFunction<void()> told);
  /// Marks the request as cancelled, and runs its callbacks.
  void cancel(IncomingRequest& incoming);
  /// Marks it, and returns the callbacks, which the caller runs. An unknown id: does nothing.
  [[nodiscard]] std::vector<UniqueFunction<void()>> mark_cancelled(std::uint64_t call);
  /// Cancels the requests. `lost`: the connection is lost and the peer lives, so those that outlive the link go on.
  void cancel_all(bool lost);

 private:
  void end_order_ticket(std::uint32_t order, const OrderTicket& order_ticket);

  const Bounds bounds_;
  std::atomic<std::size_t> started_{0};
  std::atomic<std::size_t> queued_bytes_{0};
  Mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<IncomingRequest>> requests_;
  std::map<std::uint32_t, std::deque<std::shared_ptr<OrderTicket>>> ordered_;  // by order key; the front one runs
};

}  // namespace tensorferry
