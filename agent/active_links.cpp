#include "agent/active_links.h"

#include <algorithm>
#include <utility>

namespace tensorferry {

void ActiveLinks::add(std::weak_ptr<TickedLink> link) {
  const std::lock_guard lock(mutex_);
  links_.push_back(std::move(link));
}

Pace ActiveLinks::tick(Clock::time_point now) {
  auto pace = Pace::rest;
  std::vector<std::weak_ptr<TickedLink>> candidates, active;
  {
    const std::lock_guard lock(mutex_);
    candidates.swap(links_);
  }
  for (auto& each : candidates) {
    const auto link = each.lock();
    if (!link) continue;
    const auto wanted = link->tick(now);
    pace = std::max(pace, wanted);
    if (wanted != Pace::rest && link->stay_active()) active.push_back(std::move(each));
  }
  if (active.empty()) return pace;
  const std::lock_guard lock(mutex_);
  links_.insert(links_.end(), active.begin(), active.end());
  return pace;
}

}  // namespace tensorferry
