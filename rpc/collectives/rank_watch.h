/// Notices that ranks of a group have died.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "agent/agent.h"
#include "channels/cma/process.h"
#include "rpc/collectives/membership.h"

namespace tensorferry::collectives {

/// Watches the processes of this host, and the links to the other ranks. A lost link does not prove that a rank is
/// dead, because the session goes on; so a call to the rank finds out. Thread-safe. Held by shared_ptr.
class RankWatch final : public std::enable_shared_from_this<RankWatch> {
 public:
  /// Runs on the thread that notices a death; perhaps several times for one rank.
  using Died = std::function<void(std::size_t rank, std::string_view why)>;

  /// Finds the processes of this host. May tell of deaths.
  static std::shared_ptr<RankWatch> start(std::shared_ptr<RawAgent> agent, std::shared_ptr<const Membership> group,
                                          Died died);

  /// Tells of dead ranks; asks at most every 50 ms. Never blocks. A thread that waits calls it every 100 ms.
  void look();
  /// Returns the process of another rank of this host, which may be this process; null for the others.
  [[nodiscard]] const cma::Process* process(std::size_t rank) const noexcept;
  /// Returns whether the process of the rank, on this host, has ended.
  [[nodiscard]] bool has_ended(std::size_t rank) const noexcept;

 private:
  RankWatch(std::shared_ptr<RawAgent> agent, std::shared_ptr<const Membership> group, Died died);
  void find_processes();
  void ask(std::size_t rank);

  const std::shared_ptr<RawAgent> agent_;
  const std::shared_ptr<const Membership> group_;
  const Died died_;
  std::vector<std::optional<cma::Process>> processes_;  // by rank
  std::atomic<std::int64_t> looked_at_{0};              // the last look, on the steady clock
  std::mutex mutex_;
  std::vector<bool> asked_;  // by rank: a call is to find out whether it is alive; guarded by mutex_
};

}  // namespace tensorferry::collectives
