#include "channels/region.h"

#include <atomic>
#include <iterator>
#include <utility>

#include "base/fork.h"
#include "channels/allocations.h"

namespace tensorferry {

namespace {

constexpr std::size_t page = 4096;

std::size_t whole_pages(std::size_t bytes) { return bytes <= ~page ? (bytes + page - 1) / page * page : bytes; }

/// Lets channels keep a registration of a region. Frozen memory is sent once as a rule, and a card may want to write to
/// what it registers.
std::uint64_t announce(const SharedMemory& memory) {
  if (memory.frozen()) return 0;
  return Allocations::of_this_process().add(memory.data(), memory.bytes(), Allocations::Kind::offers);
}

struct OfProcess {
  const std::uint32_t born_in = forks();
  Regions regions;
};

}  // namespace

Region::Region(SharedMemory memory, std::uint64_t id, Regions& regions)
    : memory_(std::move(memory)), id_(id), regions_(regions), born_in_(forks()), generation_(announce(memory_)) {}

Region::~Region() {
  if (born_in_ != forks()) return;  // in a forked child, where locks may be held for ever
  if (generation_ != 0) Allocations::of_this_process().remove(memory_.data(), generation_);
  regions_.remove(memory_.data());
  for (const auto& each : told_) {
    if (const auto user = each.lock()) user->gone(id_);
  }
}

Result<FileDescriptor> Region::share() {
  const std::lock_guard lock(mutex_);  // a peer may ask for it while it is closed
  return memory_.share();
}

void Region::close_descriptor() noexcept {
  const std::lock_guard lock(mutex_);
  memory_.close_descriptor();
}

void Region::tell_when_gone(std::weak_ptr<RegionUser> user) {
  const std::lock_guard lock(mutex_);
  std::erase_if(told_, [](const auto& each) { return each.expired(); });
  told_.push_back(std::move(user));
}

Regions& Regions::of_this_process() {
  // Never destroyed: regions outlive statics, and the parent of a forked child may have held the lock at the fork.
  static std::atomic<OfProcess*> current{new OfProcess};
  auto* known = current.load(std::memory_order_acquire);
  while (known->born_in != forks()) {
    auto* const fresh = new OfProcess;
    if (current.compare_exchange_strong(known, fresh, std::memory_order_acq_rel)) return fresh->regions;
    delete fresh;
  }
  return known->regions;
}

Result<Buffer> Regions::make(std::size_t bytes) {
  auto memory = SharedMemory::create(whole_pages(bytes), SharedMemory::InChild::inherited);
  if (!memory.ok()) return memory.status();
  return keep(std::move(*memory), bytes);
}

Result<Buffer> Regions::make_frozen(std::size_t bytes, UniqueFunction<void(std::byte*)> fill) {
  auto memory = SharedMemory::create_to_freeze(whole_pages(bytes));
  if (!memory.ok()) return memory.status();
  fill(memory->data());
  if (auto frozen = memory->freeze(); !frozen.ok()) return frozen;
  return keep(std::move(*memory), bytes);
}

Buffer Regions::keep(SharedMemory memory, std::size_t bytes) {
  auto* const data = memory.data();
  const std::lock_guard lock(mutex_);
  auto region = std::make_shared<Region>(std::move(memory), ++last_id_, *this);
  by_begin_.insert_or_assign(data, region);
  return Buffer{Device{}, data, bytes, nullptr, std::move(region)};
}

std::optional<Regions::Found> Regions::find(const std::byte* data, std::size_t bytes) {
  std::shared_ptr<Region> region;  // outlives the lock below: the last owner's destructor takes it
  {
    const std::lock_guard lock(mutex_);
    const auto after = by_begin_.upper_bound(data);
    if (after != by_begin_.begin()) region = std::prev(after)->second.lock();
  }
  if (region == nullptr) return std::nullopt;
  const auto offset = static_cast<std::size_t>(data - region->memory().data());
  if (offset >= region->memory().bytes() || bytes > region->memory().bytes() - offset) return std::nullopt;
  return Found{std::move(region), offset};
}

void Regions::remove(const std::byte* begin) {
  const std::lock_guard lock(mutex_);
  by_begin_.erase(begin);
}

}  // namespace tensorferry
