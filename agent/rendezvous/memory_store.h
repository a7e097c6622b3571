/// A store inside one process, for jobs of one process with one or more agents, and for tests.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "agent/store.h"
#include "agent/transport/blocking_io.h"

namespace tensorferry {

class MemoryStore final : public Store {
 public:
  explicit MemoryStore(Clock clock = {}) : clock_(std::move(clock)) {}

  Status set(std::string_view key, ByteView value) override {
    {
      const std::lock_guard lock(mutex_);
      values_.insert_or_assign(std::string(key), Bytes(value.begin(), value.end()));
    }
    changed_.notify_all();
    return {};
  }

  Result<Bytes> get(std::string_view key, std::chrono::milliseconds timeout) override {
    const auto until = deadline_after(timeout, clock_);
    std::unique_lock lock(mutex_);
    for (;;) {
      if (const auto found = values_.find(key); found != values_.end()) return found->second;
      clock_.wait_until(changed_, lock, until);
      if (clock_.now() >= until && !values_.contains(key)) {
        return Status(Code::deadline_exceeded,
                      "key \"" + std::string(key) + "\" was not set within " + std::to_string(timeout.count()) + " ms");
      }
    }
  }

  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override {
    const std::lock_guard lock(mutex_);
    if (amount == 0 && !counters_.contains(key)) return 0;
    auto& sum = counters_.try_emplace(std::string(key), 0).first->second;
    sum = static_cast<std::int64_t>(static_cast<std::uint64_t>(sum) + static_cast<std::uint64_t>(amount));  // wraps
    return sum;
  }

  Status erase(std::string_view key) override {
    const std::lock_guard lock(mutex_);
    if (const auto found = values_.find(key); found != values_.end()) values_.erase(found);
    if (const auto found = counters_.find(key); found != counters_.end()) counters_.erase(found);
    return {};
  }

  [[nodiscard]] bool loopback() const override { return true; }

  /// Returns the number of keys.
  [[nodiscard]] std::size_t size() {
    const std::lock_guard lock(mutex_);
    return values_.size() + counters_.size();
  }

 private:
  const Clock clock_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Bytes, std::less<>> values_;
  std::map<std::string, std::int64_t, std::less<>> counters_;
};

}  // namespace tensorferry
