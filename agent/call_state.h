/// The state of a call in flight, shared by its handles (Call), its link and the threads that wait for it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "agent/argument_holds.h"
#include "agent/call_outcome.h"
#include "agent/handles.h"
#include "agent/message.h"
#include "agent/transport/call_ring.h"

namespace tensorferry {

class IdempotentCall;
class OutgoingCalls;
struct CallRecord;

/// A link, as the handles of its calls see it. Threads: any.
class HandleLink {
 public:
  /// Returns the link's calls.
  virtual OutgoingCalls& calls() = 0;
  /// Runs `job` on the pool. False: the pool has been stopped, and drops the job.
  virtual bool run(UniqueFunction<void()> job, bool with_executor) = 0;
  /// Makes the reactor tick the link.
  virtual void activate() = 0;
  /// Returns whether this is the parent's link, in a forked child.
  [[nodiscard]] virtual bool inherited() const noexcept = 0;
  /// Returns the error for a forked child that uses it.
  [[nodiscard]] virtual Status used_after_fork() const = 0;

 protected:
  ~HandleLink() = default;
};

/// Why a request has not been sent yet.
enum class SendHold : std::uint8_t { none, connection, probe, order };

/// Where the link of a call keeps it until the reply comes.
struct CallPlace {
  std::uint64_t id = 0;              // in the link's table of pending calls; 0: not in it
  SlotId slot;                       // of the link's outgoing ring; valid if `in_ring`
  std::atomic<bool> in_ring{false};  // the reply comes into `slot`
};

/// What carrying the arguments of a call takes. Set before the state is shared.
struct ArgumentCost {
  std::size_t bytes = 0;                   // credit taken from the bound on bytes in flight
  std::chrono::nanoseconds device_time{};  // estimate of the time that GPUs take to copy the arguments
};

/// How this side waits for the reply of a call.
struct ReplyWait {
  std::atomic<bool> waited{false};  // a thread waits for this call as a reader of the stream, or asleep
  std::atomic<bool> lazy{false};    // has a lazy completion: no thread is told yet to take the reply for it
  bool spun = false;                // Call::spin_wait has spun for the reply, so wait() need not spin again
};

/// How far a call has come, as this side knows.
struct CallProgress {
  std::atomic<Clock::rep> sent_at{0};  // when the request was built to be sent; 0: not yet
  std::atomic<SendHold> hold{SendHold::none};
  std::atomic<bool> landing{false};    // a reply has come; its buffers may be landing in `options.into`
  std::atomic<bool> given_up{false};   // cancelled, or expired
  std::atomic<bool> asked{false};      // the callee has been asked how far the call has come
  std::shared_ptr<CallRecord> traced;  // null: no trace is recorded; set before the state is shared
};

/// What ties an idempotent call and its attempts, each of which is a call too.
struct Idempotence {
  std::weak_ptr<IdempotentCall> attempts;  // of an idempotent call; set before the state is shared
  bool may_come_again = false;             // an attempt; set before the state is shared
  bool refused = false;                    // the callee answered with an error; set before complete()
};

class Call::State final : public std::enable_shared_from_this<Call::State> {
 public:
  State(std::string function, RawCallOptions options, Clock clock = {});

  /// Ends the call with `result`; later results are dropped. Wakes the waiting thread, and hands the completion to the
  /// pool of `link`. If the pool has been stopped, runs the completion on the calling thread.
  void complete(Result<Received> result);
  [[nodiscard]] bool done() const noexcept { return outcome_.done(); }

  /// See CallOutcome.
  bool sleep(std::optional<Clock::time_point> until) { return outcome_.sleep(clock, until); }
  void wake() { outcome_.wake(); }
  void prepare_to_sleep() { outcome_.prepare_to_sleep(); }

  /// Returns whether this is the parent's call, in a forked child. No thread of the child ends it, and its lock may be
  /// held for ever.
  [[nodiscard]] bool inherited() const noexcept;

  /// Waits for an idempotent call: its attempts end on threads of the pool. See Call::wait.
  bool wait_for_attempts(std::optional<Clock::time_point> until, const std::function<bool()>& interrupted);

  Result<Received> take();
  void on_done(UniqueFunction<void(Result<Received>)> completion, bool with_executor, Notice notice);
  void escalate();
  bool claim();
  void on_sent(Completion sent, bool with_executor);

  /// Returns the function's name for errors.
  [[nodiscard]] std::string shown() const {
    return options.label.empty() ? std::string(shown_name(function)) : options.label;
  }
  /// Returns whether the reply is landing in `options.into`. The call then ends when no channel can write there.
  [[nodiscard]] bool lands_at_callers() const noexcept { return progress.landing && !options.into.empty(); }

  /// Keeps the callee's report.
  void set_report(CalleeReport report) { outcome_.set_report(report); }
  [[nodiscard]] std::optional<CalleeReport> report() const { return outcome_.report(); }

  const std::string function;
  const RawCallOptions options;
  const Clock clock;  // the agent's
  const Clock::time_point made = clock.now();
  const std::optional<Clock::time_point> deadline;
  std::shared_ptr<HandleLink> link;  // set before the state is shared with readers
  CallPlace place;
  ArgumentCost cost;
  ReplyWait wait;
  CallProgress progress;
  Idempotence idempotence;
  ArgumentHolds arguments;

 private:
  void run_completion();

  CallOutcome outcome_;
};

}  // namespace tensorferry
