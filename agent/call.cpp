#include <cerrno>
#include <utility>

#include "agent/call_state.h"
#include "agent/calls/outgoing_calls.h"
#include "agent/executor.h"
#include "agent/handles.h"
#include "agent/idempotent_call.h"
#include "agent/message.h"
#include "base/foreign_code.h"
#include "base/futex.h"
#include "base/out_of_memory.h"

namespace tensorferry {
namespace {

std::optional<Clock::time_point> deadline_of(const RawCallOptions& options, Clock::time_point now) {
  if (options.timeout.count() <= 0) return std::nullopt;
  return now + options.timeout;
}

/// Wraps `completion` so that it runs on the pool of `link`, inside the executor. If the pool has been stopped, it runs
/// on the calling thread.
Completion by_executor(std::shared_ptr<HandleLink> link, Completion completion) {
  auto held = std::make_shared<Completion>(std::move(completion));
  return [link = std::move(link), held = std::move(held)](const Status& status) {
    if (!link->run([held] { (*held)({}); }, true)) (*held)(status);
  };
}

}  // namespace

Call::State::State(std::string name, RawCallOptions call_options, Clock of_agent)
    : function(std::move(name)),
      options(std::move(call_options)),
      clock(std::move(of_agent)),
      deadline(deadline_of(options, made)) {}

bool Call::State::inherited() const noexcept { return link && !done() && link->inherited(); }

void Call::State::complete(Result<Received> result) {
  bool callback = false;
  bool executor = false;
  {
    const std::lock_guard lock(mutex_);
    if (result_) return;
    result_ = std::move(result);
    callback = static_cast<bool>(completion_);
    executor = with_executor_;
  }
  if (word_.exchange(finished, std::memory_order_seq_cst) == sleeping) futex_wake(word_);
  if (callback) {
    auto self = shared_from_this();
    bool handed = false;
    out_of_memory::with_reserve([&] { handed = link && link->run([self] { self->run_completion(); }, executor); });
    if (!handed) run_completion();
  }
}

void Call::State::run_completion() {
  UniqueFunction<void(Result<Received>)> completion;
  std::optional<Result<Received>> result;
  auto taken = out_of_memory::status();
  out_of_memory::with_reserve([&] { taken = {Code::invalid_argument, "the reply was taken already"}; });
  {
    const std::lock_guard lock(mutex_);
    if (!completion_) return;  // claimed
    completion = std::move(completion_);
    result = std::move(result_);
    result_ = std::move(taken);
  }
  run_foreign("the completion of a call", [&] { completion(std::move(*result)); });
  if (link) link->calls().lazy().ended(*this, true);
}

void Call::State::prepare_to_sleep() {
  auto expected = woken;
  word_.compare_exchange_strong(expected, idle, std::memory_order_acq_rel);
}

bool Call::State::sleep(std::optional<Clock::time_point> until) {
  auto expected = idle;
  if (!word_.compare_exchange_strong(expected, sleeping, std::memory_order_acq_rel) && expected != sleeping)
    return true;
  const bool uninterrupted = clock.wait(word_, sleeping, until);
  expected = sleeping;
  // Another thread may sleep on the word too: it says again that it sleeps, else complete() would not wake it.
  if (word_.compare_exchange_strong(expected, idle, std::memory_order_acq_rel)) futex_wake(word_);
  return uninterrupted;
}

void Call::State::wake() {
  auto was = word_.load(std::memory_order_acquire);
  while (was != finished && !word_.compare_exchange_weak(was, woken, std::memory_order_acq_rel)) {
  }
  if (was == sleeping) futex_wake(word_);
}

bool Call::State::wait_for_attempts(std::optional<Clock::time_point> until, const std::function<bool()>& interrupted) {
  const WaitInHandler place;
  while (!done()) {
    if (until && clock.now() >= *until) return false;
    prepare_to_sleep();
    if (!sleep(until) && interrupted && interrupted()) return false;
  }
  return true;
}

Result<Received> Call::State::take() {
  if (inherited()) return link->used_after_fork();
  const std::lock_guard lock(mutex_);
  if (!result_) return Status(Code::invalid_argument, "the call has not completed");
  auto result = std::move(*result_);
  result_ = Status(Code::invalid_argument, "the reply was taken already");
  return result;
}

void Call::State::on_done(UniqueFunction<void(Result<Received>)> completion, bool with_executor, Notice notice) {
  if (inherited()) return completion(link->used_after_fork());
  bool now = false;
  {
    const std::lock_guard lock(mutex_);
    completion_ = std::move(completion);
    with_executor_ = with_executor;
    now = result_.has_value();
  }
  if (now) return run_completion();
  if (notice == Notice::prompt || !link || options.idempotent) return escalate();
  lazy = true;
  if (!link->calls().lazy().become_sentinel(*this)) return link->activate();
  escalate();
  if (done()) link->calls().lazy().ended(*this, true);  // the completion may have run before this was the sentinel call
}

void Call::State::escalate() {
  lazy = false;
  if (link && !options.idempotent) link->calls().expect_reply(*this);
}

bool Call::State::claim() {
  UniqueFunction<void(Result<Received>)> dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped = std::move(completion_);
  }
  lazy = false;
  if (link) link->calls().lazy().ended(*this, false);
  return static_cast<bool>(dropped);
}

void Call::State::on_sent(Completion sent, bool with_executor) {
  {
    std::unique_lock lock(mutex_);
    if (holds_ == 0) {
      lock.unlock();
      return sent({});
    }
    sent_.push_back(with_executor && link ? by_executor(link, std::move(sent)) : std::move(sent));
  }
  escalate();  // the reply may carry the acknowledgement
}

void Call::State::set_report(CalleeReport report) {
  auto kept = std::make_unique<const CalleeReport>(report);
  const std::lock_guard lock(mutex_);
  report_.swap(kept);
}

std::optional<CalleeReport> Call::State::report() const {
  const std::lock_guard lock(mutex_);
  return report_ ? std::optional(*report_) : std::nullopt;
}

void Call::State::hold_arguments() {
  const std::lock_guard lock(mutex_);
  ++holds_;
}

void Call::State::release_arguments() {
  std::vector<Completion> sent;
  {
    const std::lock_guard lock(mutex_);
    if (--holds_ == 0) sent.swap(sent_);
  }
  for (const auto& completion : sent) completion({});
}

bool Call::wait(std::optional<Clock::time_point> until, const std::function<bool()>& interrupted) {
  if (state_->done() || state_->inherited()) return true;
  if (!state_->link) return false;
  if (state_->options.idempotent) return state_->wait_for_attempts(until, interrupted);
  return state_->link->calls().wait(*state_, until, interrupted);
}

bool Call::spin_wait(std::chrono::nanoseconds at_least) {
  return state_->done() || state_->inherited() ||
         (state_->link && state_->link->calls().ring().spin_wait(*state_, at_least));
}

bool Call::done() const noexcept {
  if (state_->inherited()) return true;
  if (!state_->done() && state_->in_ring.load(std::memory_order_acquire)) state_->link->calls().ring().poll(*state_);
  return state_->done();
}
std::string_view Call::function() const noexcept { return state_->function; }
Result<Received> Call::take() { return state_->take(); }
void Call::on_done(UniqueFunction<void(Result<Received>)> completion, bool with_executor, Notice notice) {
  state_->on_done(std::move(completion), with_executor, notice);
}
void Call::escalate() {
  if (state_->lazy && !state_->inherited()) state_->escalate();
}
bool Call::claim() { return state_->inherited() || state_->claim(); }
void Call::on_sent(Completion sent, bool with_executor) {
  if (state_->inherited()) return sent({});
  state_->on_sent(std::move(sent), with_executor);
}
void Call::cancel() {
  if (const auto attempts = state_->attempts.lock(); attempts && !state_->inherited()) return attempts->cancel();
  if (state_->link && !state_->inherited())
    state_->link->calls().cancel(state_,
                                 Status(Code::cancelled, "\"" + state_->shown() + "\" was cancelled by its caller"));
}

}  // namespace tensorferry
