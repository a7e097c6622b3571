/// What comes back for a call: reports of the callee and, once, the result, for the thread that sleeps until then or
/// the completion that takes it.
///
/// Threads: any. Completions run under no lock of this class.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "agent/message.h"
#include "agent/wire/frame.h"
#include "base/clock.h"
#include "base/function.h"
#include "base/mutex.h"
#include "base/status.h"

namespace tensorferry {

/// What the callee has told about a call shortly before its deadline.
struct CalleeReport {
  wire::CallStatus status;
  Clock::time_point at;  // when it came
};

class CallOutcome final {
 public:
  using TakeResult = UniqueFunction<void(Result<Received>)>;

  /// Whether a completion waits for the result, and how it asks to run.
  struct Awaited {
    bool by_completion = false;
    bool with_executor = false;
  };
  /// Keeps the result, if it is the first one, and wakes the sleeping thread. The caller makes an awaiting completion
  /// run (take_due()); none awaits a later result.
  Awaited set(Result<Received> result);
  [[nodiscard]] bool done() const noexcept { return word_.load(std::memory_order_seq_cst) == finished; }
  /// Takes the result. InvalidArgument: it has not come, or was taken already.
  Result<Received> take();

  /// Keeps the completion. True: the result is there, and the caller runs the completion.
  [[nodiscard]] bool keep(TakeResult completion, bool with_executor);
  /// A completion and the result for it.
  struct Due {
    TakeResult completion;  // empty: it has been claimed
    std::optional<Result<Received>> result;
  };
  /// Takes the completion and the result, which must be there.
  Due take_due();
  /// Takes the completion back; empty: there is none, or it has run.
  [[nodiscard]] TakeResult claim();

  /// Sleeps until the call ends, wake() or `until`; may return for no reason. False: a signal interrupted the sleep.
  bool sleep(const Clock& clock, std::optional<Clock::time_point> until);
  /// Wakes the sleeping thread although the call has not ended, so that it reads the stream itself.
  void wake();
  /// Clears an earlier wake(). A thread calls it before it tries to become the reader; a wake() between this and
  /// sleep() is not lost.
  void prepare_to_sleep();

  /// Keeps the callee's report.
  void set_report(CalleeReport report);
  [[nodiscard]] std::optional<CalleeReport> report() const;

 private:
  static constexpr std::uint32_t idle = 0, sleeping = 1, woken = 2, finished = 3;

  std::atomic<std::uint32_t> word_{idle};
  mutable Mutex mutex_;
  std::optional<Result<Received>> result_;
  TakeResult completion_;
  bool with_executor_ = false;
  std::unique_ptr<const CalleeReport> report_;
};

}  // namespace tensorferry
