/// Splits a transfer of runs into parts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "rpc/regions/messages.h"
#include "rpc/regions/remote_region.h"

namespace tensorferry::regions {

/// Calls `part(runs, at)` for as many runs at a time as one message may have, and for the pieces of runs that are
/// larger than a message. `at`: the place of their bytes in the reader's or the writer's memory.
template <class Part>
Status in_messages(const Runs& runs, const Part& part) {
  for (std::size_t run = 0; runs.run_bytes > most_served_bytes && run < runs.offsets.size(); ++run) {
    for (std::uint64_t at = 0; at < runs.run_bytes; at += most_served_bytes) {
      const auto bytes = std::min(most_served_bytes, runs.run_bytes - at);
      auto status = part(Runs{bytes, {runs.offsets[run] + at}}, run * runs.run_bytes + at);
      if (!status.ok()) return status;
    }
  }
  if (runs.run_bytes > most_served_bytes) return {};
  const auto fits =
      runs.run_bytes == 0 ? most_runs : std::min<std::uint64_t>(most_served_bytes / runs.run_bytes, most_runs);
  const auto at_once = static_cast<std::size_t>(std::max<std::uint64_t>(fits, 1));
  for (std::size_t first = 0; first < runs.offsets.size(); first += at_once) {
    const auto begin = runs.offsets.begin() + static_cast<std::ptrdiff_t>(first);
    const auto count = std::min(at_once, runs.offsets.size() - first);
    auto status =
        part(Runs{runs.run_bytes, {begin, begin + static_cast<std::ptrdiff_t>(count)}}, first * runs.run_bytes);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace tensorferry::regions
