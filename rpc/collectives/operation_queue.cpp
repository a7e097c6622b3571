#include "rpc/collectives/operation_queue.h"

#include <algorithm>

#include "rpc/collectives/group_work.h"

namespace tensorferry::collectives {

void OperationQueue::add(const Work& work) {
  const std::lock_guard lock(mutex_);
  work->number_ = ++started_;
  last_ = work;
  waiting_.push_back(work);
}

OperationQueue::Work OperationQueue::begin(std::uint64_t last) {
  const std::lock_guard lock(mutex_);
  if (running_ || waiting_.empty() || waiting_.front()->number() > last) return nullptr;
  running_ = true;
  auto work = std::move(waiting_.front());
  waiting_.pop_front();
  return work;
}

bool OperationQueue::wait_for_turn(std::uint64_t number, std::chrono::milliseconds longest) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return !running_ || ended_ >= number; };
  if (!over()) clock_.wait_for(changed_, lock, longest, over);
  return !running_ && ended_ < number;
}

OperationQueue::Ended OperationQueue::end(const GroupWork& work) {
  const std::lock_guard lock(mutex_);
  running_ = false;
  ended_ = std::max(ended_, work.number());
  const auto due =
      std::partition(leavers_.begin(), leavers_.end(), [this](const Leaver& each) { return ended_ < each.after; });
  Ended out{{due, leavers_.end()}, !waiting_.empty()};
  leavers_.erase(due, leavers_.end());
  changed_.notify_all();
  return out;
}

OperationQueue::Work OperationQueue::last() const {
  const std::lock_guard lock(mutex_);
  return last_.lock();
}

std::pair<std::uint64_t, std::uint64_t> OperationQueue::progress() const {
  const std::lock_guard lock(mutex_);
  return {started_, ended_};
}

std::optional<std::uint64_t> OperationQueue::stop_all(const Status& why, bool by_leaving) {
  const std::lock_guard lock(mutex_);
  if (!all_stopped_.ok()) return std::nullopt;
  all_stopped_ = why;
  stop_operations(why, by_leaving);
  return ended_;
}

void OperationQueue::stop(const Status& why) {
  const std::lock_guard lock(mutex_);
  stop_operations(why, true);
}

void OperationQueue::stop_operations(const Status& why, bool by_leaving) {
  if (stopped_.ok()) {
    stopped_ = why;
    by_leaving_ = by_leaving;
  }
  changed_.notify_all();
}

bool OperationQueue::keep(Leaver leaver) {
  const std::lock_guard lock(mutex_);
  if (ended_ >= leaver.after) return false;
  leavers_.push_back(std::move(leaver));
  return true;
}

bool OperationQueue::has_ended(std::uint64_t count) const {
  const std::lock_guard lock(mutex_);
  return ended_ >= count;
}

Status OperationQueue::stopped() const {
  const std::lock_guard lock(mutex_);
  return stopped_;
}

bool OperationQueue::stopped_by_leaving() const {
  const std::lock_guard lock(mutex_);
  return by_leaving_;
}

Status OperationQueue::all_stopped() const {
  const std::lock_guard lock(mutex_);
  return all_stopped_;
}

void OperationQueue::wait_for_stop(std::chrono::milliseconds longest) const {
  std::unique_lock lock(mutex_);
  clock_.wait_for(changed_, lock, longest, [this] { return !stopped_.ok(); });
}

}  // namespace tensorferry::collectives
