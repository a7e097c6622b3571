#include "tensorferry/future.h"

#include <condition_variable>
#include <mutex>
#include <string>

#include "agent/agent.h"
#include "base/log.h"

namespace tensorferry::detail {
namespace {

std::string text_of(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace

void log_unheard(const char* where, const std::exception_ptr& exception) noexcept {
  try {
    log_warning(std::string(where) +
                " threw, and its future was dropped before its exception was retrieved: " + text_of(exception));
  } catch (...) {  // no memory for the log line
  }
}

void run_guarded(Continuation& next) noexcept {
  try {
    next.run();
  } catch (...) {
    log_unheard("a continuation of a future", std::current_exception());
  }
}

void throw_used_future() { throw InvalidArgument("the future is empty, or its result was taken already"); }

std::exception_ptr broken_promise() {
  return std::make_exception_ptr(Cancelled("the promise was dropped without a result"));
}

class Event::State {
 public:
  mutable std::mutex mutex;
  std::condition_variable changed;
  bool set = false;
  std::unique_ptr<Continuation> next;
};

Event::Event() : state_(std::make_unique<State>()) {}
Event::~Event() = default;

void Event::set() {
  std::unique_ptr<Continuation> next;
  {
    const std::lock_guard lock(state_->mutex);
    state_->set = true;
    next = std::move(state_->next);
    state_->changed.notify_all();  // under the lock: a waiting thread may destroy this event as soon as it wakes
  }
  if (next) run_guarded(*next);
}

bool Event::is_set() const {
  const std::lock_guard lock(state_->mutex);
  return state_->set;
}

bool Event::wait(std::optional<TimePoint> until) {
  if (is_set()) return true;
  const WaitInHandler place;
  std::unique_lock lock(state_->mutex);
  if (until) return state_->changed.wait_until(lock, *until, [&] { return state_->set; });
  state_->changed.wait(lock, [&] { return state_->set; });
  return true;
}

void Event::on_set(std::unique_ptr<Continuation> next) {
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->set) {
      state_->next = std::move(next);
      return;
    }
  }
  run_guarded(*next);
}

}  // namespace tensorferry::detail
