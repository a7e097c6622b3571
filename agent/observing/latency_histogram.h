/// Counts durations in buckets that double: up to 1 us, 2 us, 4 us, ... 33.6 s, and longer.
///
/// Threads: any. Adding costs two relaxed additions.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace tensorferry {

/// The counts of a histogram at one moment.
struct LatencyCounts {
  /// Bucket i has the durations up to 2^i microseconds that are in no bucket before it; the last one has the others.
  static constexpr std::size_t buckets = 27;

  std::array<std::uint64_t, buckets> counts{};
  std::uint64_t nanoseconds = 0;  // the sum of all durations
};

class LatencyHistogram final {
 public:
  void add(std::chrono::nanoseconds duration) noexcept {
    const auto nanoseconds = static_cast<std::uint64_t>(std::max<std::int64_t>(0, duration.count()));
    const auto microseconds = (nanoseconds + 999) / 1000;
    const auto bucket = microseconds <= 1 ? 0 : static_cast<std::size_t>(std::bit_width(microseconds - 1));
    counts_[std::min(bucket, counts_.size() - 1)].fetch_add(1, std::memory_order_relaxed);
    nanoseconds_.fetch_add(nanoseconds, std::memory_order_relaxed);
  }
  [[nodiscard]] LatencyCounts counts() const noexcept {
    LatencyCounts out;
    for (std::size_t i = 0; i < counts_.size(); ++i) out.counts[i] = counts_[i].load(std::memory_order_relaxed);
    out.nanoseconds = nanoseconds_.load(std::memory_order_relaxed);
    return out;
  }

 private:
  std::array<std::atomic<std::uint64_t>, LatencyCounts::buckets> counts_{};
  std::atomic<std::uint64_t> nanoseconds_{0};
};

}  // namespace tensorferry
