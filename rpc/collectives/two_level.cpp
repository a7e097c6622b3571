// The ranks of each host reduce among themselves, on their board; one rank of each host leads, and the leaders reduce
// by messages; then each host shares the result. So a host's bytes cross the network once, however many ranks it has.
#include <algorithm>
#include <optional>
#include <utility>

#include "rpc/collectives/algorithms.h"
#include "rpc/collectives/raw_group.h"

namespace tensorferry::collectives {
namespace {

/// Runs an operation of a group below, on this thread and within the limits of the operation above. Both groups fail
/// together, so the wait ends if the group above fails. When this returns, nothing uses the operation's memory any
/// more.
template <class Start>
Status within(const WaitLimits& limits, const Start& start) {
  const auto left = std::chrono::ceil<Milliseconds>(limits.until - limits.clock.now());
  StartOptions options;
  options.timeout = std::max(left, Milliseconds(1));
  options.background = false;
  const auto work = start(std::move(options));
  if (work->wait(std::nullopt, limits.interrupted)) return work->status();
  auto why = interruption();
  work->withdraw(why);  // bytes may be landing in its memory
  return why;
}

/// Returns the rank of `root` in the group of this rank's host; nullopt: it is on another host.
std::optional<std::size_t> place_on_host(const Levels& levels, std::size_t rank, std::size_t root) {
  const auto& host_of = levels.host_of;
  if (host_of[root] != host_of[rank]) return std::nullopt;
  return std::count(host_of.begin(), host_of.begin() + static_cast<std::ptrdiff_t>(root), host_of[root]);
}

/// The tag of what a leader passes to a rank of its host, from those of the library's own.
constexpr std::uint64_t result_tag = (std::uint64_t{1} << 63U) | (std::uint64_t{1} << 62U);

}  // namespace

Status reduce_two_level(const Performing& now, const Levels& levels, InBytes input, OutBytes output, const ReduceOp& op,
                        std::size_t root) {
  if (auto status = now.meet(); !status.ok()) return status;
  const auto dtype = now.dtype();
  const bool everywhere = root == Mailbox::any_rank;
  const bool leads = levels.leaders != nullptr;
  const bool mine = everywhere || root == now.rank();  // whether `output` may be written
  const auto scratch = now.working_memory(leads && !mine ? input.size() : 0);
  if (!scratch.ok()) return scratch.status();
  const auto sum = mine ? output : OutBytes(scratch->data, leads ? input.size() : 0);
  auto& host = *levels.host;

  auto status =
      within(now.limits, [&](auto options) { return host.reduce(input, sum, dtype, op, 0, std::move(options)); });
  if (status.ok() && leads) {
    status = within(now.limits, [&](auto options) {
      return everywhere ? levels.leaders->all_reduce(sum, sum, dtype, op, std::move(options))
                        : levels.leaders->reduce(sum, sum, dtype, op, levels.host_of[root], std::move(options));
    });
  }
  if (!status.ok()) return status;
  if (everywhere) {
    return within(now.limits, [&](auto options) { return host.broadcast(output, dtype, 0, std::move(options)); });
  }
  // The leader of the root's host has the result.
  const auto root_here = place_on_host(levels, now.rank(), root);
  if (!root_here || *root_here == 0) return {};
  if (leads) {
    return within(now.limits,
                  [&](auto options) { return host.send(sum, dtype, *root_here, result_tag, std::move(options)); });
  }
  if (root != now.rank()) return {};
  return within(now.limits,
                [&](auto options) { return host.receive(output, dtype, 0, result_tag, std::move(options)); });
}

Status broadcast_two_level(const Performing& now, const Levels& levels, OutBytes data, std::size_t root) {
  if (auto status = now.meet(); !status.ok()) return status;
  const auto dtype = now.dtype();
  auto& host = *levels.host;
  const auto root_here = place_on_host(levels, now.rank(), root);
  Status status;
  if (root_here) {
    status =
        within(now.limits, [&](auto options) { return host.broadcast(data, dtype, *root_here, std::move(options)); });
  }
  if (status.ok() && levels.leaders) {
    status = within(now.limits, [&](auto options) {
      return levels.leaders->broadcast(data, dtype, levels.host_of[root], std::move(options));
    });
  }
  if (!status.ok() || root_here) return status;
  return within(now.limits, [&](auto options) { return host.broadcast(data, dtype, 0, std::move(options)); });
}

}  // namespace tensorferry::collectives
