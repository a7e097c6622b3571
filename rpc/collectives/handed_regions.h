/// The regions of this process (channels/region.h) that the other ranks of a group have mapped.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "channels/region.h"
#include "rpc/collectives/board.h"

namespace tensorferry::collectives {

/// Thread-safe. Held by shared_ptr, because regions tell it of their end.
class HandedRegions final : public RegionUser, public std::enable_shared_from_this<HandedRegions> {
 public:
  HandedRegions(std::shared_ptr<RawAgent> agent, std::uint64_t group, std::size_t rank, std::vector<std::string> names)
      : agent_(std::move(agent)), group_(group), rank_(rank), names_(std::move(names)) {}

  struct Handed {
    std::uint64_t region = 0;
    std::vector<std::uint64_t> offsets;  // of each span
  };
  /// Returns the region of this process in which all non-empty `spans` lie, once every other rank has mapped it.
  /// nullopt: they lie in none, or a rank cannot map it.
  std::optional<Handed> hand_over(std::span<const std::span<const std::byte>> spans, const WaitLimits& limits);

  /// Tells the other ranks to unmap the region.
  void gone(std::uint64_t id) noexcept override;

 private:
  bool map_everywhere(const Regions::Found& found, const WaitLimits& limits);

  const std::shared_ptr<RawAgent> agent_;
  const std::uint64_t group_;
  const std::size_t rank_;
  const std::vector<std::string> names_;
  std::mutex mutex_;
  std::set<std::uint64_t> mapped_, refused_;
};

}  // namespace tensorferry::collectives
