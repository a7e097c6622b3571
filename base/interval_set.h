/// A set of numbers that is almost all of 1..n, stored as runs. Not thread-safe.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace tensorferry {

class IntervalSet {
 public:
  /// Bound on the runs. Beyond it the set merges the two lowest runs, so the numbers in the gap between them count as
  /// contained. Gaps are numbers that are still under way, so only a peer that leaves gaps on purpose reaches the
  /// bound.
  static constexpr std::size_t most_runs = 65536;

  [[nodiscard]] bool contains(std::uint64_t number) const {
    auto run = runs_.upper_bound(number);
    return run != runs_.begin() && std::prev(run)->second >= number;
  }
  void insert(std::uint64_t number) {
    if (contains(number)) return;
    auto after = runs_.upper_bound(number);
    auto first = number, last = number;
    if (after != runs_.end() && after->first == number + 1) {
      last = after->second;
      after = runs_.erase(after);
    }
    if (after != runs_.begin() && std::prev(after)->second == number - 1) {
      first = std::prev(after)->first;
      runs_.erase(std::prev(after));
    }
    runs_[first] = last;
    if (runs_.size() > most_runs) {
      const auto second = std::next(runs_.begin());
      const auto end = second->second;
      runs_.erase(second);
      runs_.begin()->second = end;
    }
  }
  /// Removes all numbers below `bound`.
  void erase_below(std::uint64_t bound) {
    while (!runs_.empty() && runs_.begin()->first < bound) {
      const auto last = runs_.begin()->second;
      runs_.erase(runs_.begin());
      if (last >= bound) runs_.emplace(bound, last);
    }
  }
  [[nodiscard]] std::size_t runs() const { return runs_.size(); }

 private:
  std::map<std::uint64_t, std::uint64_t> runs_;  // from first to last number; disjoint, not adjacent
};

}  // namespace tensorferry
