#include "rpc/c/events.h"

#include <algorithm>
#include <utility>

#include "rpc/c/calls.h"

namespace tensorferry::c {

Events::~Events() { leave(); }

bool Events::admit(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (left_ || calls_ >= most_calls_ || bytes > most_bytes_ - bytes_) return false;
  ++calls_;
  bytes_ += bytes;
  return true;
}

void Events::answered(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  --calls_;
  bytes_ -= bytes;
}

void Events::add_call(std::unique_ptr<tferry_call> call) {
  const std::lock_guard lock(mutex_);  // released before `call`, whose destructor ends its count
  if (left_) return;
  events_.push_back({TFERRY_CALLED, 0, 0, call.get()});
  static_cast<void>(call.release());
  changed_.notify_one();
}

void Events::add_completed(std::uint64_t token) {
  const std::lock_guard lock(mutex_);
  events_.push_back({TFERRY_COMPLETED, 0, token, nullptr});
  changed_.notify_one();
}

tferry_event Events::next(std::optional<std::chrono::milliseconds> timeout) {
  std::unique_lock lock(mutex_);
  const auto ready = [&] { return left_ || has_released_ || !events_.empty(); };
  if (!timeout) {
    changed_.wait(lock, ready);
  } else if (!changed_.wait_for(lock, *timeout, ready)) {
    return {TFERRY_NOTHING, 0, 0, nullptr};
  }
  if (events_.empty()) {
    has_released_ = false;
    return {left_ ? TFERRY_LEFT : TFERRY_NOTHING, 0, 0, nullptr};
  }
  const auto event = events_.front();
  events_.pop_front();
  return event;
}

void Events::leave() {
  std::vector<std::unique_ptr<tferry_call>> dropped;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  left_ = true;
  for (const auto& event : events_) {
    if (event.call != nullptr) dropped.emplace_back(event.call);
  }
  std::erase_if(events_, [](const tferry_event& event) { return event.call != nullptr; });
  changed_.notify_all();
}

std::shared_ptr<void> Events::owner_of(std::uint64_t number) {
  if (number == 0) return nullptr;
  {
    const std::lock_guard lock(released_mutex_);
    ++lent_;
  }
  return {this, [events = shared_from_this(), number](void*) { events->add_released(number); }};
}

void Events::add_released(std::uint64_t number) {
  {
    const std::lock_guard lock(released_mutex_);
    released_.push_back(number);
    if (!std::exchange(asked_, false)) return;
  }
  const std::lock_guard lock(mutex_);
  has_released_ = true;
  changed_.notify_one();
}

std::size_t Events::take_released(std::uint64_t* numbers, std::size_t most) {
  const std::lock_guard lock(released_mutex_);
  const auto count = std::min(most, released_.size());
  std::copy(released_.end() - static_cast<std::ptrdiff_t>(count), released_.end(), numbers);
  released_.resize(released_.size() - count);
  lent_ -= count;
  asked_ = lent_ > released_.size();
  return count;
}

}  // namespace tensorferry::c
