/// The acknowledgements that one side of a link owes the peer: the release ids of buffers whose sources it has read.
///
/// Threads: any.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/mutex.h"

namespace tensorferry {

class Acknowledgements final {
 public:
  void add(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    ids_.push_back(id);
  }
  /// Takes out up to `most` ids.
  std::vector<std::uint64_t> take(std::size_t most) {
    const std::lock_guard lock(mutex_);
    if (ids_.empty()) return {};
    const auto count = std::min(most, ids_.size());
    std::vector<std::uint64_t> taken(ids_.end() - static_cast<std::ptrdiff_t>(count), ids_.end());
    ids_.resize(ids_.size() - count);
    return taken;
  }
  /// Returns ids that were taken and not sent.
  void put_back(const std::vector<std::uint64_t>& ids) {
    const std::lock_guard lock(mutex_);
    ids_.insert(ids_.end(), ids.begin(), ids.end());
  }

  /// Begins and ends the reading of a source whose sender waits for the acknowledgement.
  void begin_reading() noexcept { ++reading_; }
  void end_reading() noexcept { --reading_; }
  /// Returns whether such sources are being read.
  [[nodiscard]] bool any_read() const noexcept { return reading_ > 0; }

 private:
  Mutex mutex_;
  std::vector<std::uint64_t> ids_;  // under mutex_
  std::atomic<int> reading_{0};
};

}  // namespace tensorferry
