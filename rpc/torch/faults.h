/// Faults that the agent injects into its own sends, for tests of programs and libraries that use it.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace tensorferry::torch_rpc {

/// Which messages fail, and which are late. Types are those of torch::distributed::rpc::MessageType.
struct Faults {
  std::set<int> fail;                              // types whose first `failures` sends fail
  int failures = 0;                                // per message, told apart by its payload
  std::map<int, std::chrono::milliseconds> delay;  // by type: how long a send takes
  [[nodiscard]] bool any() const noexcept { return !fail.empty() || !delay.empty(); }
};

/// Decides which sends fail. Thread-safe.
class FaultInjector final {
 public:
  explicit FaultInjector(Faults faults) : faults_(std::move(faults)) {}

  /// Returns whether this send of the message must fail. Counts the sends of each message of a failing type.
  [[nodiscard]] bool fails(int type, std::string_view payload) {
    if (!faults_.fail.contains(type)) return false;
    const std::lock_guard lock(mutex_);
    auto& failed = failed_[std::string(payload)];
    if (failed >= faults_.failures) return false;
    ++failed;
    return true;
  }
  /// Returns how long a send of that type takes.
  [[nodiscard]] std::chrono::milliseconds delay(int type) const {
    const auto found = faults_.delay.find(type);
    return found == faults_.delay.end() ? std::chrono::milliseconds(0) : found->second;
  }

 private:
  const Faults faults_;
  std::mutex mutex_;
  std::map<std::string, int> failed_;  // by payload: how often it failed
};

}  // namespace tensorferry::torch_rpc
