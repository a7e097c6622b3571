#include "channels/allocations.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include "base/fork.h"

namespace tensorferry {

namespace {

struct OfOneProcess {
  const std::uint32_t born_in = forks();
  Allocations allocations;
};

std::uint64_t next_generation() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

bool contains(const Allocations::Allocation& allocation, const std::byte* data, std::size_t bytes) {
  if (data < allocation.base) return false;
  const auto offset = static_cast<std::size_t>(data - allocation.base);
  return offset < allocation.bytes && bytes <= allocation.bytes - offset;
}

}  // namespace

/// Keeps the owner of announced memory.
class Allocations::Held final {
 public:
  Held(std::byte* base, std::size_t bytes, Owner owner)
      : owner_(std::move(owner)), allocation_{base, bytes, next_generation(), Kind::offers} {
    auto& all = of_this_process();
    const std::lock_guard lock(all.mutex_);
    all.held_.push_back(allocation_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (born_in_ != forks()) return;
    auto& all = of_this_process();
    {
      const std::lock_guard lock(all.mutex_);
      std::erase_if(all.held_, [&](const auto& each) { return each.generation == allocation_.generation; });
    }
    for (const auto& user : all.users()) user->gone(allocation_.generation);
  }

 private:
  const std::uint32_t born_in_ = forks();
  const Owner owner_;  // destroyed after the users were told
  const Allocation allocation_;
};

Allocations& Allocations::of_this_process() {
  // Never destroyed: memory outlives statics, and the parent of a forked child may have held the lock at the fork.
  static std::atomic<OfOneProcess*> current{new OfOneProcess};
  auto* known = current.load(std::memory_order_acquire);
  while (known->born_in != forks()) {
    auto* const fresh = new OfOneProcess;
    if (current.compare_exchange_strong(known, fresh, std::memory_order_acq_rel)) return fresh->allocations;
    delete fresh;
  }
  return known->allocations;
}

std::uint64_t Allocations::add(std::byte* base, std::size_t bytes, Kind kind) {
  const Allocation added{base, bytes, next_generation(), kind};
  const std::lock_guard lock(mutex_);
  by_base_.insert_or_assign(base, added);
  return added.generation;
}

void Allocations::remove(std::byte* base, std::uint64_t generation) noexcept {
  {
    const std::lock_guard lock(mutex_);
    const auto found = by_base_.find(base);
    if (found != by_base_.end() && found->second.generation == generation) by_base_.erase(found);
  }
  for (const auto& user : users()) user->gone(generation);
}

std::shared_ptr<void> Allocations::hold(std::byte* base, std::size_t bytes, Owner owner) {
  auto held = std::make_shared<Held>(base, bytes, std::move(owner));
  for (const auto& user : users()) user->held(base, bytes);
  return held;
}

std::optional<Allocations::Allocation> Allocations::find(const std::byte* data, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  for (const auto& each : held_) {
    if (contains(each, data, bytes)) return each;
  }
  const auto after = by_base_.upper_bound(data);
  if (after == by_base_.begin()) return std::nullopt;
  const auto& before = std::prev(after)->second;
  return contains(before, data, bytes) ? std::optional(before) : std::nullopt;
}

Allocations::Allocation Allocations::find_on_device(std::byte* base, std::size_t bytes,
                                                    std::span<const std::uint64_t> pieces) {
  std::vector<OnDevice> ended;
  Allocation found{base, bytes, 0, Kind::offers};
  {
    const std::lock_guard lock(mutex_);
    for (auto [at, end] = on_device_.equal_range(base); at != end;) {
      const auto& known = at->second;
      const bool same_size = known.allocation.bytes == bytes;
      if (same_size && std::equal(pieces.begin(), pieces.end(), known.pieces.begin(), known.pieces.end()))
        return known.allocation;
      const bool replaced = same_size || known.pieces.front() != pieces.front();
      if (replaced) ended.push_back(known);
      at = replaced ? on_device_.erase(at) : std::next(at);
    }
    found.generation = next_generation();
    on_device_.emplace(base, OnDevice{found, {pieces.begin(), pieces.end()}});
  }
  tell_gone(ended);
  return found;
}

void Allocations::invalidate_on_device(const std::byte* base, std::size_t bytes) noexcept {
  std::vector<OnDevice> ended;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(on_device_, [&](const auto& entry) {
      const auto& known = entry.second.allocation;
      const bool overlaps = known.base < base + bytes && base < known.base + known.bytes;
      if (overlaps) ended.push_back(entry.second);
      return overlaps;
    });
  }
  tell_gone(ended);
}

void Allocations::tell_gone(const std::vector<OnDevice>& ended) const noexcept {
  if (ended.empty()) return;
  for (const auto& user : users()) {
    for (const auto& each : ended) user->gone(each.allocation.generation);
  }
}

bool Allocations::exists(const Allocation& allocation) const {
  const auto same = [&](const Allocation& each) { return each.generation == allocation.generation; };
  const std::lock_guard lock(mutex_);
  const auto found = by_base_.find(allocation.base);
  const auto [begin, end] = on_device_.equal_range(allocation.base);
  return (found != by_base_.end() && same(found->second)) || std::any_of(held_.begin(), held_.end(), same) ||
         std::any_of(begin, end, [&](const auto& entry) { return same(entry.second.allocation); });
}

void Allocations::tell(std::weak_ptr<AllocationUser> user) {
  const std::lock_guard lock(mutex_);
  std::erase_if(users_, [](const auto& each) { return each.expired(); });
  users_.push_back(std::move(user));
}

std::vector<std::shared_ptr<AllocationUser>> Allocations::users() const {
  std::vector<std::shared_ptr<AllocationUser>> living;
  const std::lock_guard lock(mutex_);
  for (const auto& each : users_) {
    if (auto user = each.lock()) living.push_back(std::move(user));
  }
  return living;
}

}  // namespace tensorferry
