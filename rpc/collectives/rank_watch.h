/// Notices that ranks of a group have died.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "agent/agent.h"
#include "channels/cma/process.h"
#include "rpc/collectives/host_processes.h"
#include "rpc/collectives/membership.h"

namespace tensorferry::collectives {

/// Watches the processes of this host, and the links to the other ranks. A lost link does not prove that a rank is
/// dead, because the session goes on; so a call to the rank finds out. Thread-safe. Held by shared_ptr.
class RankWatch final : public std::enable_shared_from_this<RankWatch> {
 public:
  /// Runs on the thread that notices a death; perhaps several times for one rank.
  using Died = std::function<void(std::size_t rank, std::string_view why)>;

  /// Finds the processes of this host among `processes`. May tell of deaths.
  static std::shared_ptr<RankWatch> start(std::shared_ptr<RawAgent> agent, std::shared_ptr<const Membership> group,
                                          HostProcesses& processes, Died died);

  /// Does not tell of the end of `rank` any more: it has left the group.
  void leave_out(std::size_t rank);
  /// Returns why the rank counts as dead; empty if nothing is known of its end. Knows of ranks that are left out too.
  [[nodiscard]] std::string why_dead(std::size_t rank) const;
  /// Tells of dead ranks; asks at most every 50 ms. Never blocks. A thread that waits calls it every 100 ms.
  void look();
  /// Returns the process of another rank of this host, which may be this process; null for the others.
  [[nodiscard]] const cma::Process* process(std::size_t rank) const noexcept;
  /// Returns whether the process of the rank, on this host, has ended.
  [[nodiscard]] bool has_ended(std::size_t rank) const noexcept;
  /// Returns the text that the process of the rank, on this host, has ended.
  [[nodiscard]] std::string end_of_process(std::size_t rank) const;

 private:
  RankWatch(std::shared_ptr<RawAgent> agent, std::shared_ptr<const Membership> group, Died died);
  void find_processes(HostProcesses& processes);
  void ask(std::size_t rank);
  void tell(std::size_t rank, std::string_view why);
  [[nodiscard]] bool is_left_out(std::size_t rank) const;

  const std::shared_ptr<RawAgent> agent_;
  const std::shared_ptr<const Membership> group_;
  const Died died_;
  std::vector<std::shared_ptr<const cma::Process>> processes_;  // by rank
  std::atomic<std::int64_t> looked_at_{0};                      // the last look, on the agent's clock
  mutable std::mutex mutex_;                                    // guards the next three, which are by rank
  std::vector<bool> asked_;                                     // a call is to find out whether it is alive
  std::vector<bool> left_out_;
  std::vector<std::string> dead_;  // why; empty: it is not known to be dead
};

}  // namespace tensorferry::collectives
