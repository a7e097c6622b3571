#include "agent/call_outcome.h"

#include <utility>

#include "base/futex.h"
#include "base/out_of_memory.h"

namespace tensorferry {

CallOutcome::Awaited CallOutcome::set(Result<Received> result) {
  Awaited awaited;
  {
    const std::lock_guard lock(mutex_);
    if (result_) return {};
    result_ = std::move(result);
    awaited = {static_cast<bool>(completion_), with_executor_};
  }
  if (word_.exchange(finished, std::memory_order_seq_cst) == sleeping) futex_wake(word_);
  return awaited;
}

Result<Received> CallOutcome::take() {
  const std::lock_guard lock(mutex_);
  if (!result_) return Status(Code::invalid_argument, "the call has not completed");
  auto result = std::move(*result_);
  result_ = Status(Code::invalid_argument, "the reply was taken already");
  return result;
}

bool CallOutcome::keep(TakeResult completion, bool with_executor) {
  const std::lock_guard lock(mutex_);
  completion_ = std::move(completion);
  with_executor_ = with_executor;
  return result_.has_value();
}

CallOutcome::Due CallOutcome::take_due() {
  Due due;
  auto taken = out_of_memory::status();
  out_of_memory::with_reserve([&] { taken = {Code::invalid_argument, "the reply was taken already"}; });
  const std::lock_guard lock(mutex_);
  if (!completion_) return due;
  due.completion = std::move(completion_);
  due.result = std::move(result_);
  result_ = std::move(taken);
  return due;
}

CallOutcome::TakeResult CallOutcome::claim() {
  const std::lock_guard lock(mutex_);
  return std::move(completion_);
}

void CallOutcome::prepare_to_sleep() {
  auto expected = woken;
  word_.compare_exchange_strong(expected, idle, std::memory_order_acq_rel);
}

bool CallOutcome::sleep(const Clock& clock, std::optional<Clock::time_point> until) {
  auto expected = idle;
  if (!word_.compare_exchange_strong(expected, sleeping, std::memory_order_acq_rel) && expected != sleeping)
    return true;
  const bool uninterrupted = clock.wait(word_, sleeping, until);
  expected = sleeping;
  // Another thread may sleep on the word too: it says again that it sleeps, else complete() would not wake it.
  if (word_.compare_exchange_strong(expected, idle, std::memory_order_acq_rel)) futex_wake(word_);
  return uninterrupted;
}

void CallOutcome::wake() {
  auto was = word_.load(std::memory_order_acquire);
  while (was != finished && !word_.compare_exchange_weak(was, woken, std::memory_order_acq_rel)) {
  }
  if (was == sleeping) futex_wake(word_);
}

void CallOutcome::set_report(CalleeReport report) {
  auto kept = std::make_unique<const CalleeReport>(report);
  const std::lock_guard lock(mutex_);
  report_.swap(kept);
}

std::optional<CalleeReport> CallOutcome::report() const {
  const std::lock_guard lock(mutex_);
  return report_ ? std::optional(*report_) : std::nullopt;
}

}  // namespace tensorferry
