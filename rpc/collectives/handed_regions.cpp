#include "rpc/collectives/handed_regions.h"

#include <algorithm>
#include <utility>

#include "rpc/collectives/messages.h"

namespace tensorferry::collectives {

std::optional<HandedRegions::Handed> HandedRegions::hand_over(std::span<const std::span<const std::byte>> spans,
                                                              const WaitLimits& limits) {
  std::optional<Regions::Found> first;
  Handed out;
  for (const auto& span : spans) {
    auto found = span.empty() ? std::nullopt : Regions::of_this_process().find(span.data(), span.size());
    if (!span.empty() && (!found || (first && found->region != first->region))) return std::nullopt;
    out.offsets.push_back(found ? found->offset : 0);
    if (found) first = std::move(found);
  }
  if (!first || first->region->memory().frozen()) return std::nullopt;
  out.region = first->region->id();
  {
    const std::lock_guard lock(mutex_);
    if (mapped_.contains(out.region)) return out;
    if (refused_.contains(out.region)) return std::nullopt;
  }
  const bool mapped = map_everywhere(*first, limits);
  {
    const std::lock_guard lock(mutex_);
    (mapped ? mapped_ : refused_).insert(out.region);
  }
  first->region->tell_when_gone(weak_from_this());
  return mapped ? std::optional(std::move(out)) : std::nullopt;
}

bool HandedRegions::map_everywhere(const Regions::Found& found, const WaitLimits& limits) {
  const auto& memory = found.region->memory();
  std::vector<Call> calls;
  for (std::size_t to = 0; to < names_.size(); ++to) {
    if (to == rank_) continue;
    Message message;
    message.payload = encode(GroupMessage(MapRegion{group_, static_cast<std::uint32_t>(rank_), found.region->id()}));
    message.buffers.push_back({{}, memory.data(), memory.bytes(), nullptr, found.region});
    message.sharing.push_back(Sharing::shared);
    RawCallOptions options;
    options.timeout = Milliseconds(10000);
    calls.push_back(agent_->call(names_[to], group_function, std::move(message), std::move(options)));
  }
  bool all = true;
  for (auto& call : calls) {
    while (!call.wait(limits.clock.now() + longest_sleep)) {
      if (!why_ended(limits).ok()) call.cancel();
    }
    all = call.take().ok() && all;
  }
  return all;
}

void HandedRegions::gone(std::uint64_t id) noexcept {
  {
    const std::lock_guard lock(mutex_);
    refused_.erase(id);
    if (mapped_.erase(id) == 0) return;
  }
  for (std::size_t to = 0; to < names_.size(); ++to) {
    if (to == rank_) continue;
    Message message;
    message.payload = encode(GroupMessage(UnmapRegion{group_, static_cast<std::uint32_t>(rank_), id}));
    RawCallOptions options;
    options.timeout = Milliseconds(10000);
    agent_->call(names_[to], group_function, std::move(message), std::move(options));
  }
}

}  // namespace tensorferry::collectives
