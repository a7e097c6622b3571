#include "rpc/collectives/torch/transfer_lane.h"

#include <chrono>
#include <system_error>
#include <utility>

#include "base/threads.h"

namespace tensorferry::collectives {

void TransferLane::run(Task task, bool here, const std::function<bool()>& interrupted) {
  {
    const std::lock_guard lock(mutex_);
    if (running_ || !here) waiting_.push_back(std::move(task));
    if (std::exchange(running_, true)) return;
  }
  if (!here) return run_waiting_elsewhere();
  task(interrupted);
  task = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.empty()) {
      running_ = false;
      return idle_.notify_all();
    }
  }
  run_waiting_elsewhere();  // other threads have given more meanwhile
}

bool TransferLane::wait_until_idle(const std::function<bool()>& interrupted) {
  constexpr std::chrono::milliseconds slice{50};
  std::unique_lock lock(mutex_);
  while (!idle_.wait_for(lock, slice, [this] { return !running_; })) {
    lock.unlock();
    if (interrupted && interrupted()) return false;
    lock.lock();
  }
  return true;
}

void TransferLane::run_waiting() {
  while (true) {
    Task next;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.empty()) {
        running_ = false;
        return idle_.notify_all();
      }
      next = std::move(waiting_.front());
      waiting_.pop_front();
    }
    next({});
  }
}

void TransferLane::run_waiting_elsewhere() {
  try {
    start_thread([self = shared_from_this()] { self->run_waiting(); }).detach();
  } catch (const std::system_error&) {  // the system gives no thread
    run_waiting();
  }
}

}  // namespace tensorferry::collectives
