/// The ranks of a process group of torch.distributed as they meet in a store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "rpc/collectives/groups.h"
#include "rpc/collectives/torch/process_group.h"

namespace tensorferry::collectives {

/// Returns the number by which torch knows a rank of a group: its rank in the world.
std::uint64_t number_of(const TorchGroupOptions& options, std::size_t rank);

/// One rank's part: each rank tells the others the name of its agent in the store. `groups` and `options` outlive it.
/// Functions throw c10::DistBackendError.
class Meeting final {
 public:
  Meeting(Groups& groups, int rank, int size, const TorchGroupOptions& options);
  /// Throws if a member is known to have died. Uses no store, because its host may have died too.
  void check_members() const;
  /// Tells the name of this rank's agent. Returns the names that other ranks had told before. Throws if a process that
  /// lives has told its own for this rank.
  [[nodiscard]] std::vector<std::string> tell(c10d::Store& store) const;
  /// Returns the names of all ranks when they have told them, at the time-out of the options at the latest. Asks again
  /// and again, so that other threads can use the connection of the store. Those of the names in `before` whose agents
  /// have ended are of processes that were killed, in a store that outlives them: waits for the new names.
  [[nodiscard]] std::vector<std::string> await_names(c10d::Store& store, std::vector<std::string> before) const;

 private:
  /// Names the ranks that have not come.
  [[nodiscard]] std::string missing(c10d::Store& store, const std::vector<std::string>& ended) const;
  [[noreturn]] void throw_missing(c10d::Store& store, const std::vector<std::string>& ended) const;

  Groups& groups_;
  const std::size_t rank_;
  const TorchGroupOptions& options_;
  std::vector<std::string> keys_;
};

}  // namespace tensorferry::collectives
