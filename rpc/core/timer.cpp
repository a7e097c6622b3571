#include "rpc/core/timer.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <utility>

#include "base/fork.h"
#include "base/thread_signals.h"

namespace tensorferry {

using Clock = std::chrono::steady_clock;

struct Timer::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::multimap<Clock::time_point, UniqueFunction<void()>> due;
  bool stopped = false;
  std::shared_ptr<Queue> kept;  // in a forked child: the queue itself, so that it is never freed
};

Timer::Timer() : forks_(forks()), queue_(std::make_shared<Queue>()) {}

Timer::~Timer() {
  if (forks_ != forks()) {  // in a forked child: a thread of the parent may have held the lock at the fork
    if (thread_.joinable()) thread_.detach();
    queue_->kept = queue_;
    return;
  }
  std::multimap<Clock::time_point, UniqueFunction<void()>> dropped;  // destroyed after the lock is released
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->stopped = true;
    dropped.swap(queue_->due);
  }
  queue_->changed.notify_all();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Timer::after(std::chrono::milliseconds delay, UniqueFunction<void()> what) {
  if (forks_ != forks()) return;
  // At most a century, so that the sum does not overflow.
  const auto due = Clock::now() + std::min<std::chrono::milliseconds>(delay, std::chrono::hours(24 * 36500));
  const std::lock_guard lock(queue_->mutex);
  const bool first = queue_->due.empty() || due < queue_->due.begin()->first;
  queue_->due.emplace(due, std::move(what));
  if (!thread_.joinable()) {
    const auto before = block_signals_of_others();
    thread_ = std::thread([queue = queue_] { run(queue); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  } else if (first) {
    queue_->changed.notify_all();
  }
}

void Timer::run(const std::shared_ptr<Queue>& queue) {
  std::unique_lock lock(queue->mutex);
  while (!queue->stopped) {
    if (queue->due.empty()) {
      queue->changed.wait(lock);
      continue;
    }
    const auto next = queue->due.begin();
    if (next->first > Clock::now()) {
      queue->changed.wait_until(lock, next->first);
      continue;
    }
    {
      const auto what = std::move(next->second);
      queue->due.erase(next);
      lock.unlock();
      what();
    }  // `what` is destroyed before the lock is taken again
    lock.lock();
  }
}

}  // namespace tensorferry
