/// Ends the wait of calls whose time has passed, at the caller alone.
///
/// The deadline of RawCallOptions would also keep a late request from being served. torch's protocol of references
/// needs each request to be served: the callee learns from it of the references that it carries.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "agent/agent.h"
#include "base/foreign_code.h"
#include "base/threads.h"

namespace tensorferry::torch_rpc {

/// Runs functions at their times, on a thread of its own, which starts with the first one. A function that blocks
/// delays the others. Thread-safe.
class Timeouts final {
 public:
  using Key = std::pair<Clock::time_point, std::uint64_t>;

  Timeouts() = default;
  Timeouts(const Timeouts&) = delete;
  Timeouts& operator=(const Timeouts&) = delete;
  ~Timeouts() { stop(); }

  Key add(Clock::time_point when, std::function<void()> expire) {
    const std::lock_guard lock(mutex_);
    const Key key{when, ++last_};
    const auto at = waiting_.emplace(key, std::move(expire)).first;
    if (!thread_.joinable() && !stopped_) thread_ = start_thread([this] { run(); });
    if (at == waiting_.begin()) changed_.notify_one();
    return key;
  }
  /// Does nothing if the function has begun.
  void remove(const Key& key) {
    std::function<void()> dropped;  // is destroyed without the lock
    {
      const std::lock_guard lock(mutex_);
      const auto found = waiting_.find(key);
      if (found == waiting_.end()) return;
      dropped = std::move(found->second);
      waiting_.erase(found);
    }
  }
  /// Drops the functions whose times have not come. Waits for one that runs, unless it calls stop() itself. Idempotent.
  void stop() {
    std::map<Key, std::function<void()>> dropped;
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
      dropped.swap(waiting_);
      changed_.notify_one();
    }
    if (!thread_.joinable()) return;
    if (thread_.get_id() == std::this_thread::get_id())
      thread_.detach();
    else
      thread_.join();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!stopped_) {
      if (waiting_.empty()) {
        changed_.wait(lock);
        continue;
      }
      const auto first = waiting_.begin();
      if (const auto due = first->first.first; Clock().now() < due) {  // a copy: remove() frees the entry meanwhile
        changed_.wait_until(lock, due);
        continue;
      }
      auto expire = std::move(first->second);
      waiting_.erase(first);
      lock.unlock();
      run_foreign("the end of a call of torch.distributed.rpc", expire);
      expire = nullptr;  // may hold what takes other locks when it is destroyed
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::function<void()>> waiting_;
  std::uint64_t last_ = 0;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace tensorferry::torch_rpc
