/// The one-sided transfers of this rank to one other, in their order.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "base/function.h"

namespace tensorferry::collectives {

/// Runs tasks one after the other: on the thread of the caller, or on one that it starts and that ends with the last
/// task. Thread-safe. Held by shared_ptr; a thread that runs tasks keeps it.
class TransferLane final : public std::enable_shared_from_this<TransferLane> {
 public:
  /// A task owns all that it uses, and throws nothing. `interrupted`: it should end early; may be empty.
  using Task = UniqueFunction<void(const std::function<bool()>& interrupted)>;

  /// Runs `task` after those that have been given before. `here`: on this thread, if no other task is left; it gets
  /// `interrupted` then. Else on another thread, and the call returns at once.
  void run(Task task, bool here, const std::function<bool()>& interrupted = {});
  /// Waits until no task is left and returns true; or returns false because `interrupted` was true.
  bool wait_until_idle(const std::function<bool()>& interrupted);

 private:
  void run_waiting();
  void run_waiting_elsewhere();

  std::mutex mutex_;
  std::condition_variable idle_;
  bool running_ = false;  // a thread runs a task, and then those that wait
  std::deque<Task> waiting_;
};

}  // namespace tensorferry::collectives
