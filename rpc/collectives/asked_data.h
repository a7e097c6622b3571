/// The requests of ranks for data of steps that this rank has not posted yet.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "agent/agent.h"

namespace tensorferry::collectives {

/// Keeps the replies by rank and data. Each holds the connections of its link, so each rank has a bound, and a request
/// that its rank has given up is dropped. Not thread-safe. Replies that it hands out are ended or destroyed by the
/// caller, under no lock.
class AskedData final {
 public:
  /// The requests of one rank. A ring asks for all chunks of a block at once: those of 32 GiB.
  static constexpr std::size_t most = std::size_t{1} << 16;
  /// The step, or the chunk of a ring, and the sequence in it.
  using Which = std::pair<std::uint64_t, std::uint64_t>;

  explicit AskedData(std::size_t ranks) : of_rank_(ranks) {}

  /// Returns whether `rank` may ask for no more.
  [[nodiscard]] bool full(std::size_t rank) const { return of_rank_[rank].size() >= most; }
  /// Keeps a request. A request of the rank for the same data is put into `ended`.
  void add(std::size_t rank, const Which& which, Reply reply, std::vector<Reply>& ended) {
    take(rank, which, ended);
    of_rank_[rank].emplace(which, std::move(reply));
  }
  /// Puts the request for this data into `out`, if there is one.
  void take(std::size_t rank, const Which& which, std::vector<Reply>& out) {
    if (auto found = of_rank_[rank].extract(which)) out.push_back(std::move(found.mapped()));
  }
  /// The same if its rank has given it up, or has gone.
  void take_given_up(std::size_t rank, const Which& which, std::vector<Reply>& out) {
    const auto found = of_rank_[rank].find(which);
    if (found == of_rank_[rank].end() || !found->second.cancelled()) return;
    out.push_back(std::move(found->second));
    of_rank_[rank].erase(found);
  }
  /// Puts the requests for data of steps up to `number` into `out`.
  void take_up_to(std::uint64_t number, std::vector<Reply>& out) {
    for (auto& asked : of_rank_) {
      const auto end = asked.lower_bound({number + 1, 0});
      std::transform(asked.begin(), end, std::back_inserter(out), [](auto& each) { return std::move(each.second); });
      asked.erase(asked.begin(), end);
    }
  }
  void take_all(std::vector<Reply>& out) {
    for (auto& asked : of_rank_) {
      for (auto& [which, reply] : asked) out.push_back(std::move(reply));
      asked.clear();
    }
  }
  /// Returns how many requests of `rank` are kept.
  [[nodiscard]] std::size_t count(std::size_t rank) const { return of_rank_[rank].size(); }

 private:
  std::vector<std::map<Which, Reply>> of_rank_;
};

}  // namespace tensorferry::collectives
