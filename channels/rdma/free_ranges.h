/// The free ranges of a run of bytes, of which pieces of any size are taken and given back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <optional>

namespace tensorferry::rdma {

/// Takes the first range that is large enough. Pieces live for one transfer, so what is free joins again soon. Not
/// thread-safe.
class FreeRanges final {
 public:
  /// The whole units of `bytes` bytes are free.
  explicit FreeRanges(std::size_t bytes) {
    if (bytes >= alignment) free_.emplace(0, bytes / alignment * alignment);
  }

  /// Returns `bytes` rounded up to what a piece of so many bytes takes.
  [[nodiscard]] static std::size_t rounded(std::size_t bytes) {
    return (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  }

  /// Returns the offset of a piece of `bytes` bytes, which is rounded(); nullopt if no range is so large.
  std::optional<std::size_t> take(std::size_t bytes) {
    const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& each) { return each.second >= bytes; });
    if (found == free_.end()) return std::nullopt;
    const auto [offset, available] = *found;
    free_.erase(found);
    if (available > bytes) free_.emplace(offset + bytes, available - bytes);
    return offset;
  }

  /// Takes back such a piece, and joins it with its neighbours.
  void give_back(std::size_t offset, std::size_t bytes) {
    auto after = free_.upper_bound(offset);
    if (after != free_.end() && offset + bytes == after->first) {
      bytes += after->second;
      after = free_.erase(after);
    }
    if (after != free_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    free_.emplace(offset, bytes);
  }

 private:
  static constexpr std::size_t alignment = 64;

  std::map<std::size_t, std::size_t> free_;  // offset to bytes
};

}  // namespace tensorferry::rdma
