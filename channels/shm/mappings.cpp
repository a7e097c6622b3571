#include "channels/shm/mappings.h"

#include <atomic>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/text.h"

namespace tensorferry::shm {

/// The memory of one slot. Each claimed buffer in it holds a reference.
struct Mappings::Mapping {
  struct Block {
    std::atomic<bool> held{false};
    std::uint32_t generation = 0;  // of the last lending; guarded by mutex_
  };
  Mapping(SharedMemory m, Geometry g, std::shared_ptr<const SharedMemory> l)
      : memory(std::move(m)), geometry(g), ledger(std::move(l)), blocks(g.blocks) {}

  const SharedMemory memory;
  const Geometry geometry;
  const std::shared_ptr<const SharedMemory> ledger;
  std::vector<Block> blocks;
};

/// The owner of one claimed block. Its destructor returns the block.
struct Mappings::Held {
  Held(std::shared_ptr<Mapping> m, const Lending& l) : mapping(std::move(m)), lending(l) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (forks() == born_in) give_back();
  }

  void give_back() const {
    const auto word = word_at(mapping->memory, mapping->geometry.words_at() + lending.block * sizeof(std::uint64_t));
    auto head = word_at(*mapping->ledger, Ledger::returned_at);
    const bool spent = children() != children_before;
    word_at(*mapping->ledger, Ledger::core_at).store(current_core(), std::memory_order_relaxed);
    mapping->blocks[lending.block].held.store(false, std::memory_order_release);
    auto last = head.load(std::memory_order_relaxed);
    do {
      const Returned returned{static_cast<std::uint32_t>(last), lending.generation, spent};
      word.store(returned.word(), std::memory_order_relaxed);
    } while (!head.compare_exchange_weak(last, lending.number(), std::memory_order_release, std::memory_order_relaxed));
  }

  const std::shared_ptr<Mapping> mapping;
  const Lending lending;
  const std::uint32_t born_in = forks();
  const std::uint32_t children_before = children();
};

Status Mappings::map_ledger(FileDescriptor descriptor, std::uint64_t nonce) {
  auto memory = SharedMemory::map(std::move(descriptor), Ledger::bytes, SharedMemory::InChild::inherited);
  if (!memory.ok()) return memory.status();
  if (word_at(*memory, Ledger::nonce_at).load(std::memory_order_acquire) != nonce) {
    return {Code::protocol_error, "the shared memory does not hold the announced nonce"};
  }
  word_at(*memory, Ledger::answer_at).store(~nonce, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  if (!closed_ && ledger_ == nullptr) ledger_ = std::make_shared<const SharedMemory>(std::move(*memory));
  return {};
}

Status Mappings::map(const Segment& segment, FileDescriptor descriptor) {
  const auto bytes = segment.geometry.bytes();
  return keep(segment.slot, SharedMemory::map(std::move(descriptor), bytes, SharedMemory::InChild::inherited),
              segment.geometry);
}

Status Mappings::keep(std::uint32_t slot, Result<SharedMemory> memory, Geometry geometry) {
  MappedSlot replaced;  // unmapped after the lock is released
  const std::lock_guard lock(mutex_);
  if (closed_ || ledger_ == nullptr) return {};
  auto& place = slots_[slot];
  std::swap(replaced, place);
  if (memory.ok()) place.mapping = std::make_shared<Mapping>(std::move(*memory), geometry, ledger_);
  return memory.status();
}

void Mappings::drop(std::uint32_t slot) {
  MappedSlot dropped;
  const std::lock_guard lock(mutex_);
  if (auto found = slots_.extract(slot)) dropped = std::move(found.mapped());
}

/// Finds the mapping of a slot. Call it under mutex_.
Result<std::shared_ptr<Mappings::Mapping>> Mappings::find(std::uint32_t slot) {
  if (closed_) return Status(Code::connection_lost, "the link has ended");
  const auto found = slots_.find(slot);
  if (found == slots_.end()) {
    return Status(Code::protocol_error, formatted("the ticket names slot {} of shared memory, which is empty", slot));
  }
  if (found->second.mapping == nullptr) {
    return Status(Code::resource_exhausted, "the shared memory of a buffer could not be mapped");
  }
  return found->second.mapping;
}

Result<Buffer> Mappings::claim(const Lending& lending, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = find(lending.slot);
  if (!found.ok()) return found.status();
  const auto& mapping = *found;
  const auto size = mapping->geometry.block_bytes;
  if (lending.block >= mapping->geometry.blocks || bytes == 0 || bytes > size) {
    return Status(Code::protocol_error,
                  formatted("the ticket names {} bytes of block {} in slot {}, which has {} blocks of {} bytes", bytes,
                            lending.block, lending.slot, mapping->geometry.blocks, size));
  }
  auto& block = mapping->blocks[lending.block];
  if (block.held.load(std::memory_order_acquire) || block.generation == lending.generation) {
    return Status(Code::protocol_error, formatted("the ticket names block {} in slot {}, which is {}", lending.block,
                                                  lending.slot, block.held ? "lent already" : "returned already"));
  }
  block.generation = lending.generation;
  block.held.store(true, std::memory_order_relaxed);
  return Buffer{Device{}, mapping->memory.data() + lending.block * size, static_cast<std::size_t>(bytes), nullptr,
                std::make_shared<Held>(mapping, lending)};
}

// ---- Memory that is handed over

Status Mappings::map(const Handover& handover, FileDescriptor descriptor) {
  auto mapped = SharedMemory::map_handed(std::move(descriptor), handover.bytes);
  std::shared_ptr<const SharedMemory> replaced;  // unmapped after the lock is released
  const std::lock_guard lock(mutex_);
  if (closed_) return {};
  // Twice the sender's bound, because regions that have ended stay here until their last tickets come.
  if (regions_.size() >= 2 * most_regions && !regions_.contains(handover.region)) {
    return {Code::resource_exhausted, formatted("{} pieces of memory are shared already", regions_.size())};
  }
  auto& region = regions_[handover.region];
  replaced = std::move(region.memory);
  if (mapped.ok()) region.memory = std::make_shared<const SharedMemory>(std::move(*mapped));
  return mapped.status();
}

void Mappings::gone(const RegionEnded& gone) {
  std::shared_ptr<const SharedMemory> dropped;
  const std::lock_guard lock(mutex_);
  const auto region = regions_.find(gone.region);
  if (region == regions_.end()) return;
  region->second.last = gone.tickets;
  if (region->second.tickets < gone.tickets) return;
  dropped = std::move(region->second.memory);
  regions_.erase(region);
}

/// Counts a ticket of the region that has come, drops the region after its last one, and returns the region's memory.
/// Call it under mutex_.
std::shared_ptr<const SharedMemory> Mappings::count(Regions::iterator region) {
  auto& [number, entry] = *region;
  auto memory = entry.memory;
  if (++entry.tickets >= entry.last.value_or(~std::uint64_t{0})) regions_.erase(region);
  return memory;
}

void Mappings::skip(const Handed& handed) {
  std::shared_ptr<const SharedMemory> dropped;
  const std::lock_guard lock(mutex_);
  auto region = regions_.find(handed.region);
  // A discarded ticket does not wait for its control message, so it may come before the region.
  if (region == regions_.end() && !closed_ && regions_.size() < 2 * most_regions) {
    region = regions_.try_emplace(handed.region).first;
  }
  if (region != regions_.end()) dropped = count(region);
}

Result<Buffer> Mappings::claim(const Handed& handed, std::uint64_t bytes, bool& shared) {
  std::shared_ptr<const SharedMemory> memory;
  const std::lock_guard lock(mutex_);
  if (closed_) return Status(Code::connection_lost, "the link has ended");
  const auto region = regions_.find(handed.region);
  if (region == regions_.end()) {
    return Status(Code::protocol_error,
                  formatted("the ticket names region {} of shared memory, which was not handed over", handed.region));
  }
  memory = count(region);
  if (memory == nullptr) return Status(Code::resource_exhausted, "shared memory could not be mapped");
  if (bytes == 0 || handed.offset > memory->bytes() || bytes > memory->bytes() - handed.offset) {
    return Status(Code::protocol_error, formatted("the ticket names {} bytes at {} of region {}, which has {} bytes",
                                                  bytes, handed.offset, handed.region, memory->bytes()));
  }
  shared = !memory->frozen();
  if (!shared) {
    auto own = memory->copy_on_write();
    if (!own.ok()) return own.status();
    auto* const begin = own->get() + handed.offset;
    return Buffer{Device{}, begin, static_cast<std::size_t>(bytes), nullptr, *std::move(own)};
  }
  auto* const data = memory->data() + handed.offset;
  return Buffer{Device{}, data, static_cast<std::size_t>(bytes), nullptr,
                std::shared_ptr<void>(std::const_pointer_cast<SharedMemory>(std::move(memory)))};
}

void Mappings::close() noexcept {
  std::unordered_map<std::uint32_t, MappedSlot> slots;
  Regions regions;
  std::shared_ptr<const SharedMemory> ledger;
  const std::lock_guard lock(mutex_);
  closed_ = true;
  slots.swap(slots_);
  regions.swap(regions_);
  ledger.swap(ledger_);
}

}  // namespace tensorferry::shm
