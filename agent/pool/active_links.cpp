#include "agent/pool/active_links.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/out_of_memory.h"

namespace tensorferry {

void ActiveLinks::add(std::weak_ptr<TickedLink> link) {
  const std::lock_guard lock(mutex_);
  links_.push_back(std::move(link));
}

Pace ActiveLinks::tick(Clock::time_point now) {
  auto pace = Pace::rest;
  decltype(links_) active;
  {
    const std::lock_guard lock(mutex_);
    active.swap(links_);
  }
  std::erase_if(active, [&](const auto& each) {
    const auto link = each.lock();
    if (!link) return true;
    auto wanted = Pace::run;
    try {
      wanted = link->tick(now);
    } catch (const std::bad_alloc&) {  // the next tick does the rest
      out_of_memory::release_reserve();
    }
    pace = std::max(pace, wanted);
    return wanted == Pace::rest || !link->stay_active();
  });
  const std::lock_guard lock(mutex_);
  links_.splice(links_.end(), active);
  return pace;
}

}  // namespace tensorferry
