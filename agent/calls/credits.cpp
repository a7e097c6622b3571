#include "agent/calls/credits.h"

#include <algorithm>
#include <mutex>

#include "base/futex.h"

namespace tensorferry {

bool Credits::try_acquire(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!closed_ && (!waiters_.empty() || !fits(bytes))) return false;
  in_flight_ += bytes;
  return true;
}

bool Credits::wait(std::size_t bytes, std::optional<Clock::time_point> until) {
  Waiter self{bytes};
  {
    const std::lock_guard lock(mutex_);
    waiters_.push_back(&self);
    grant();
  }
  while (self.granted.load() == 0) {
    if (until && clock_.now() >= *until) {
      const std::lock_guard lock(mutex_);
      if (self.granted.load() != 0) return true;
      std::erase(waiters_, &self);
      grant();  // smaller messages behind this one may fit
      return false;
    }
    clock_.wait(self.granted, 0, until);
  }
  // grant() wakes under the lock, and must be done with `self` before it goes out of scope.
  const std::lock_guard lock(mutex_);
  return true;
}

/// Under mutex_.
void Credits::grant() {
  while (!waiters_.empty() && fits(waiters_.front()->bytes)) {
    auto& next = *waiters_.front();
    waiters_.pop_front();
    in_flight_ += next.bytes;
    next.granted.store(1);
    futex_wake(next.granted);
  }
}

void Credits::release(std::size_t bytes) {
  if (bytes == 0) return;
  const std::lock_guard lock(mutex_);
  in_flight_ -= bytes;
  grant();
}

std::size_t Credits::taken() const {
  const std::lock_guard lock(mutex_);
  return in_flight_;
}

void Credits::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  grant();
}

void UntakenReplies::add(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  bytes_ += bytes;
  if (bytes_ <= most_ || paused_ || closed_) return;
  paused_ = true;
  pause_(true);
}

void UntakenReplies::remove(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  bytes_ -= bytes;
  if (bytes_ > most_ / 2 || !paused_) return;
  paused_ = false;
  pause_(false);
}

void UntakenReplies::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  if (!std::exchange(paused_, false)) return;
  pause_(false);
}

}  // namespace tensorferry
