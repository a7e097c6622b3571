#include "channels/shm/handovers.h"

#include <utility>

#include "base/text.h"

namespace tensorferry::shm {

std::variant<ControlId, Refusal> Handovers::hand(const std::shared_ptr<Region>& region) {
  const std::lock_guard lock(mutex_);
  if (closed_) return Refusal{formatted("the link to {} has ended", wire_.peer())};
  auto known = regions_.find(region->id());
  if (known == regions_.end() || known->second.told == 0) {
    if (known == regions_.end() && regions_.size() >= most_regions) {
      return Refusal{formatted("{} pieces of memory are shared with {} already", regions_.size(), wire_.peer())};
    }
    auto descriptor = region->share();
    if (!descriptor.ok()) return Refusal{std::string(descriptor.status().what())};
    if (known == regions_.end()) {
      region->tell_when_gone(weak_from_this());
      known = regions_.try_emplace(region->id()).first;
    }
    Descriptors descriptors;
    descriptors.push_back(std::move(*descriptor));
    known->second.told =
        wire_.control(encode(Handover{region->id(), region->memory().bytes()}), std::move(descriptors));
  }
  ++known->second.tickets;
  return known->second.told;
}

void Handovers::withdrawn(std::uint64_t region) {
  const std::lock_guard lock(mutex_);
  const auto known = regions_.find(region);
  if (known != regions_.end() && known->second.tickets > 0) --known->second.tickets;
}

void Handovers::missed(std::uint64_t region) {
  const std::lock_guard lock(mutex_);
  if (const auto known = regions_.find(region); known != regions_.end()) known->second.told = 0;
}

void Handovers::gone(std::uint64_t region) noexcept {
  const std::lock_guard lock(mutex_);
  const auto known = regions_.extract(region);
  if (closed_ || known.empty()) return;
  wire_.control(encode(RegionEnded{region, known.mapped().tickets}), {});
}

void Handovers::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  regions_.clear();
}

}  // namespace tensorferry::shm
