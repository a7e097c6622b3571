#include "base/background.h"

#include <new>
#include <system_error>
#include <utility>

#include "base/foreign_code.h"
#include "base/fork.h"
#include "base/threads.h"

namespace tensorferry {

namespace {
constexpr std::chrono::seconds lingers_for{1};
}  // namespace

Background::Background(Clock clock) : born_in_(forks()), state_(std::make_shared<State>()) {
  state_->clock = std::move(clock);
}

Background::~Background() {
  if (born_in_ != forks()) {
    (void)new (std::nothrow) std::shared_ptr(state_);  // leaked: the thread and the locks are the parent's
    return;
  }
  std::multimap<Clock::time_point, Job> dropped;
  {
    const std::lock_guard lock(state_->mutex);
    state_->ended = true;
    dropped.swap(state_->jobs);
    state_->changed.notify_all();
  }
  if (!state_->thread.joinable()) return;
  if (state_->thread.get_id() == std::this_thread::get_id()) {
    state_->thread.detach();
  } else {
    state_->thread.join();
  }
}

void Background::submit(Job job, Clock::time_point at) {
  if (born_in_ != forks()) return;
  auto& state = *state_;
  const std::lock_guard lock(state.mutex);
  if (state.ended) return;
  const bool first = state.jobs.empty() || at < state.jobs.begin()->first;
  state.jobs.emplace(at, std::move(job));
  if (!state.alive) {
    try {
      state.thread = start_thread([kept = state_] { State::run(kept); });
      state.alive = true;
    } catch (const std::system_error&) {
      return;  // the next submit() tries again
    }
  }
  if (first) state.changed.notify_all();
}

void Background::State::run(const std::shared_ptr<State>& state) {
  auto& [clock, mutex, changed, jobs, alive, ended, thread] = *state;
  std::unique_lock lock(mutex);
  while (!ended) {
    if (jobs.empty()) {
      if (!changed.wait_for(lock, lingers_for, [&] { return ended || !jobs.empty(); })) break;
      continue;
    }
    if (const auto due = jobs.begin()->first; due > clock.now()) {
      clock.wait_until(changed, lock, due);
      continue;
    }
    auto job = std::move(jobs.extract(jobs.begin()).mapped());
    lock.unlock();
    run_foreign("a job in the background", [&] { job(); });
    job = {};
    lock.lock();
  }
  alive = false;
  if (!ended) thread.detach();  // the destructor joins a thread only when it has ended it
}

}  // namespace tensorferry
