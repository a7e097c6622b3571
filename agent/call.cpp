#include <cerrno>
#include <utility>

#include "agent/call_state.h"
#include "agent/calls/outgoing_calls.h"
#include "agent/executor.h"
#include "agent/handles.h"
#include "agent/idempotent_call.h"
#include "agent/message.h"
#include "base/foreign_code.h"
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
  const auto awaited = outcome_.set(std::move(result));
  if (!awaited.by_completion) return;
  auto self = shared_from_this();
  bool handed = false;
  out_of_memory::with_reserve(
      [&] { handed = link && link->run([self] { self->run_completion(); }, awaited.with_executor); });
  if (!handed) run_completion();
}

void Call::State::run_completion() {
  auto due = outcome_.take_due();
  if (!due.completion) return;
  run_foreign("the completion of a call", [&] { due.completion(std::move(*due.result)); });
  if (link) link->calls().lazy().ended(*this, true);
}

bool Call::State::wait_for_attempts(std::optional<Clock::time_point> until, const std::function<bool()>& interrupted) {
  const WaitInHandler waiting;
  while (!done()) {
    if (until && clock.now() >= *until) return false;
    prepare_to_sleep();
    if (!sleep(until) && interrupted && interrupted()) return false;
  }
  return true;
}

Result<Received> Call::State::take() {
  if (inherited()) return link->used_after_fork();
  return outcome_.take();
}

void Call::State::on_done(UniqueFunction<void(Result<Received>)> completion, bool with_executor, Notice notice) {
  if (inherited()) return completion(link->used_after_fork());
  if (outcome_.keep(std::move(completion), with_executor)) return run_completion();
  if (notice == Notice::prompt || !link || options.idempotent) return escalate();
  wait.lazy = true;
  if (!link->calls().lazy().become_sentinel(*this)) return link->activate();
  escalate();
  if (done()) link->calls().lazy().ended(*this, true);  // the completion may have run before this was the sentinel call
}

void Call::State::escalate() {
  wait.lazy = false;
  if (link && !options.idempotent) link->calls().expect_reply(*this);
}

bool Call::State::claim() {
  const auto dropped = outcome_.claim();
  wait.lazy = false;
  if (link) link->calls().lazy().ended(*this, false);
  return static_cast<bool>(dropped);
}

void Call::State::on_sent(Completion sent, bool with_executor) {
  const auto keep = [&] { return with_executor && link ? by_executor(link, std::move(sent)) : std::move(sent); };
  if (!arguments.when_released(keep)) return sent({});
  escalate();  // the reply may carry the acknowledgement
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
  if (!state_->done() && state_->place.in_ring.load(std::memory_order_acquire))
    state_->link->calls().ring().poll(*state_);
  return state_->done();
}
std::string_view Call::function() const noexcept { return state_->function; }
Result<Received> Call::take() { return state_->take(); }
void Call::on_done(UniqueFunction<void(Result<Received>)> completion, bool with_executor, Notice notice) {
  state_->on_done(std::move(completion), with_executor, notice);
}
void Call::escalate() {
  if (state_->wait.lazy && !state_->inherited()) state_->escalate();
}
bool Call::claim() { return state_->inherited() || state_->claim(); }
void Call::on_sent(Completion sent, bool with_executor) {
  if (state_->inherited()) return sent({});
  state_->on_sent(std::move(sent), with_executor);
}
void Call::cancel() {
  if (const auto attempts = state_->idempotence.attempts.lock(); attempts && !state_->inherited())
    return attempts->cancel();
  if (state_->link && !state_->inherited())
    state_->link->calls().cancel(state_,
                                 Status(Code::cancelled, "\"" + state_->shown() + "\" was cancelled by its caller"));
}

}  // namespace tensorferry
