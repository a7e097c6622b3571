/// Counts the bytes that one channel has handed to another one of its link (Wire::carrier).
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "base/mutex.h"

namespace tensorferry {

/// Thread-safe.
class CarriedBytes final {
 public:
  struct Count {
    std::uint64_t sent = 0, received = 0;
  };
  /// By the names of a channel and of its carrier.
  using All = std::map<std::pair<std::string, std::string>, Count>;

  void add(std::string_view channel, std::string_view carrier, std::uint64_t sent, std::uint64_t received) {
    const std::lock_guard lock(mutex_);
    auto& count = all_[{std::string(channel), std::string(carrier)}];
    count.sent += sent;
    count.received += received;
  }
  [[nodiscard]] All all() const {
    const std::lock_guard lock(mutex_);
    return all_;
  }

 private:
  mutable Mutex mutex_;
  All all_;
};

}  // namespace tensorferry
