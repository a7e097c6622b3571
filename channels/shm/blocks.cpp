#include "channels/shm/blocks.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/fork.h"
#include "base/text.h"

namespace tensorferry::shm {

namespace {

constexpr std::size_t smallest_slab = std::size_t{256} << 10;
constexpr std::size_t largest_slab = std::size_t{8} << 20;
constexpr std::size_t populated_at_once = std::size_t{1} << 20;  // another thread's allocation may wait for one piece
constexpr std::chrono::seconds retry_after{1};
constexpr std::uint32_t no_slot = ~0U;
constexpr std::size_t collected_at_once = 4096;

double megabytes(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

std::size_t Limits::default_held_bytes() {
  const auto pages = ::sysconf(_SC_PHYS_PAGES);
  const auto quarter = pages > 0 ? static_cast<std::size_t>(pages) / 4 * page : std::size_t{1} << 30;
  return std::min(quarter, std::size_t{4} << 30);
}

/// One memfd of blocks of one size. The pool and each `Block` that is being filled hold a reference.
struct Blocks::Segment {
  Segment(SharedMemory m, Geometry g, std::size_t c, std::uint32_t s)
      : memory(std::move(m)), geometry(g), index(c), slot(s), generations(g.blocks), out(g.blocks) {
    for (std::uint32_t block = g.blocks; block-- > 0;) free.push_back(block);  // block 0 is lent first
  }
  [[nodiscard]] Word word(std::uint32_t block) const {
    return word_at(memory, geometry.words_at() + block * sizeof(std::uint64_t));
  }
  [[nodiscard]] bool idle() const { return lent == 0; }

  const SharedMemory memory;
  const Geometry geometry;
  const std::size_t index;  // of the size class
  const std::uint32_t slot;
  ControlId after = 0;
  std::vector<std::uint32_t> generations;  // of each block's last lending
  std::vector<bool> out;
  std::vector<std::uint32_t> free;  // the block that was used last comes last
  std::uint32_t lent = 0;           // number of blocks that are out
  std::uint32_t spent = 0;          // number of spent blocks; above 0, no block of the segment is lent
  Clock::time_point idle_since = Clock::now();
};

Blocks::Blocks(Wire& wire, SharedMemory ledger, const Limits& limits, std::shared_ptr<Usage> usage,
               Background& background)
    : wire_(wire),
      ledger_(std::move(ledger)),
      limits_(limits),
      usage_(std::move(usage)),
      background_(background),
      born_in_(forks()) {}

Blocks::~Blocks() {
  if (born_in_ == forks()) close();
}

std::variant<Blocks::Block, Refusal> Blocks::take(std::size_t bytes, bool last_resort) {
  if (bytes > limits_.held_bytes) {
    return Refusal{formatted("the buffer is larger than the {} MB that receivers may hold",
                             fixed(megabytes(limits_.held_bytes), 0))};
  }
  const auto index = size_class::of(bytes);
  const auto size = size_class::bytes_of(index);
  std::unique_lock lock(mutex_);
  if (closed_) return Refusal{formatted("the link to {} has ended", wire_.peer())};
  collect();
  if (const auto held = usage_->held.load(std::memory_order_relaxed); held + size > limits_.held_bytes) {
    return Refusal{formatted("receivers hold {} MB of shared memory, and may hold {}", fixed(megabytes(held), 0),
                             fixed(megabytes(limits_.held_bytes), 0))};
  }
  auto& of_size = classes_[index];
  for (bool failed = false; last_resort && !failed && of_size.open.empty();) {  // other threads may take the new blocks
    lock.unlock();
    grow(index);
    lock.lock();
    failed = !of_size.failure.empty();
    if (closed_) return Refusal{formatted("the link to {} has ended", wire_.peer())};
  }
  if (of_size.open.empty()) {
    want_more(index);
    if (!of_size.failure.empty()) return Refusal{of_size.failure};
    return Refusal{formatted("no warm block of {} MB yet", fixed(megabytes(size), 1)), true};
  }

  auto& segment = *of_size.open.back();
  const auto block = segment.free.back();
  segment.free.pop_back();
  if (segment.free.empty()) of_size.open.pop_back();
  segment.out[block] = true;
  ++segment.lent;
  auto& generation = segment.generations[block];
  generation = (generation + 1) % Lending::generations;
  usage_->idle.fetch_sub(size, std::memory_order_relaxed);
  usage_->held.fetch_add(size, std::memory_order_relaxed);
  return Block{segment.memory.data() + block * segment.geometry.block_bytes,
               {segment.slot, block, generation},
               segment.after,
               segments_[segment.slot],
               word_at(ledger_, Ledger::core_at).load(std::memory_order_relaxed) == current_core()};
}

void Blocks::put_back(const Lending& lending) {
  const std::lock_guard lock(mutex_);
  auto* const segment = lending.slot < segments_.size() ? segments_[lending.slot].get() : nullptr;
  const bool out = segment != nullptr && lending.block < segment->geometry.blocks && segment->out[lending.block] &&
                   segment->generations[lending.block] == lending.generation;
  if (!out) return;
  segment->out[lending.block] = false;
  free(*segment, lending.block, false);
}

/// Takes the list of blocks that the receiver has returned and frees them. Takes a long list in parts, because an offer
/// waits for this. The walk ends even if the receiver writes a cyclic list: a visited block is no longer out.
void Blocks::collect() {
  if (next_returned_ == 0) {
    auto head = word_at(ledger_, Ledger::returned_at);
    if (head.load(std::memory_order_relaxed) == 0) return;
    next_returned_ = static_cast<std::uint32_t>(head.exchange(0, std::memory_order_acquire));
  }
  while (next_returned_ != 0 && returned_.size() < collected_at_once) {
    const auto number = std::exchange(next_returned_, 0);
    const auto slot = (number - 1) / Geometry::most_blocks, block = (number - 1) % Geometry::most_blocks;
    auto* const segment = slot < segments_.size() ? segments_[slot].get() : nullptr;
    if (segment == nullptr || block >= segment->geometry.blocks) break;
    const auto returned = Returned::of(segment->word(block).load(std::memory_order_relaxed));
    if (!segment->out[block] || segment->generations[block] != returned.generation) break;
    segment->out[block] = false;
    returned_.push_back({segment, block, returned.spent});
    next_returned_ = returned.next;
  }
  // The list begins with the block that was returned last. It is freed last, so that it is lent first.
  for (; !returned_.empty(); returned_.pop_back()) {
    const auto& last = returned_.back();
    free(*last.segment, last.block, last.spent);
  }
}

void Blocks::free(Segment& segment, std::uint32_t block, bool spent) {
  const auto size = segment.geometry.block_bytes;
  auto& of_size = classes_[segment.index];
  --segment.lent;
  usage_->held.fetch_sub(size, std::memory_order_relaxed);
  if (spent && segment.spent++ == 0) {  // lends no block of the segment again, so that the whole segment can be retired
    usage_->idle.fetch_sub(segment.free.size() * size, std::memory_order_relaxed);
    segment.free.clear();
    std::erase(of_size.open, &segment);
  }
  if (segment.spent == 0) {
    if (segment.free.empty()) of_size.open.push_back(&segment);
    segment.free.push_back(block);
    const auto idle = usage_->idle.fetch_add(size, std::memory_order_relaxed) + size;
    if (idle > limits_.idle_bytes && !std::exchange(trims_.now, true)) trim_at(Clock::time_point::min());
  }
  if (!segment.idle()) return;
  segment.idle_since = Clock::now();
  if (segment.spent > 0) retire(segment.slot);
}

/// Drops an idle segment here and at the peer. Unmapping takes long, so the background thread does it.
void Blocks::retire(std::uint32_t slot) {
  auto segment = std::move(segments_[slot]);
  auto& of_size = classes_[segment->index];
  std::erase(of_size.open, segment.get());
  of_size.bytes -= segment->geometry.words_at();
  usage_->idle.fetch_sub(segment->free.size() * segment->geometry.block_bytes, std::memory_order_relaxed);
  wire_.control(encode(SegmentDropped{slot}), {});
  free_slots_.push_back(slot);
  background_.submit([segment = std::move(segment)]() mutable { segment.reset(); });
}

std::uint32_t Blocks::new_slot() {
  if (!free_slots_.empty()) {
    const auto slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
  }
  if (segments_.size() == most_slots) return no_slot;
  segments_.push_back(nullptr);
  return static_cast<std::uint32_t>(segments_.size() - 1);
}

/// Returns the next segment's geometry: as large as all segments of the class together, within bounds. So many blocks
/// need few segments, and few blocks need little memory.
Geometry Blocks::next_segment(std::size_t index) const {
  const auto size = size_class::bytes_of(index);
  const auto wanted = std::clamp(classes_[index].bytes, smallest_slab, largest_slab);
  return {size, static_cast<std::uint32_t>(std::max<std::size_t>(1, wanted / size))};
}

void Blocks::want_more(std::size_t index) {
  auto& of_size = classes_[index];
  if (of_size.growing || Clock::now() < of_size.retry_at) return;
  of_size.growing = true;
  background_.submit([weak = weak_from_this(), index] {
    if (const auto blocks = weak.lock()) blocks->grow(index);
  });
}

/// Creates a segment and populates its pages. It never leaves that to the first write: if the system has no page left
/// (vm.overcommit_memory=2), the write raises SIGBUS.
void Blocks::grow(std::size_t index) {
  Geometry geometry;
  {
    const std::lock_guard lock(mutex_);
    geometry = next_segment(index);
  }
  auto memory = SharedMemory::create(geometry.bytes());
  for (std::size_t at = 0; memory.ok() && at < geometry.bytes(); at += populated_at_once) {
    if (ended_.load(std::memory_order_relaxed)) return;
    if (!memory->populate(at, std::min(populated_at_once, geometry.bytes() - at)))
      memory = Status(Code::resource_exhausted, formatted("no memory for {} blocks", geometry.blocks));
  }
  install(index, std::move(memory), geometry);
}

/// Tells the peer of a new segment and adds its blocks to the free ones. If there is no memory, keeps the reason.
void Blocks::install(std::size_t index, Result<SharedMemory> memory, Geometry geometry) {
  auto descriptor = memory.ok() ? memory->share() : Result<FileDescriptor>(memory.status());
  if (memory.ok()) memory->close_descriptor();
  const std::lock_guard lock(mutex_);
  auto& of_size = classes_[index];
  of_size.growing = false;
  if (closed_) return;
  const auto slot = descriptor.ok() ? new_slot() : no_slot;
  of_size.failure.clear();
  if (slot == no_slot) {
    of_size.failure = descriptor.ok() ? "too many segments of shared memory" : std::string(descriptor.status().what());
    of_size.retry_at = Clock::now() + retry_after;
    return;
  }
  auto segment = std::make_shared<Segment>(std::move(*memory), geometry, index, slot);
  Descriptors descriptors;
  descriptors.push_back(std::move(*descriptor));
  segment->after = wire_.control(encode(shm::Segment{slot, geometry}), std::move(descriptors));
  of_size.bytes += geometry.words_at();
  of_size.open.push_back(segment.get());
  segments_[slot] = std::move(segment);
  usage_->idle.fetch_add(geometry.words_at(), std::memory_order_relaxed);
  if (!std::exchange(trims_.later, true)) trim_at(Clock::now() + limits_.idle_for);
}

void Blocks::trim_at(Clock::time_point when) {
  background_.submit(
      [weak = weak_from_this()] {
        if (const auto blocks = weak.lock()) blocks->trim();
      },
      when);
}

void Blocks::trim() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  do collect();
  while (next_returned_ != 0);
  std::vector<Segment*> idle;
  for (const auto& segment : segments_) {
    if (segment != nullptr && segment->idle()) idle.push_back(segment.get());
  }
  std::sort(idle.begin(), idle.end(), [](auto* a, auto* b) { return a->idle_since < b->idle_since; });
  const auto now = Clock::now();
  for (const auto* segment : idle) {
    const auto bytes = usage_->idle.load(std::memory_order_relaxed);
    const bool old = segment->idle_since + limits_.idle_for <= now;
    if (bytes > limits_.idle_bytes || (old && bytes > limits_.floor_bytes)) retire(segment->slot);
  }
  trims_.now = false;
  // Repeats while the pool has more than the floor. After that, the next new segment schedules a trim again.
  trims_.later =
      usage_->held.load(std::memory_order_relaxed) + usage_->idle.load(std::memory_order_relaxed) > limits_.floor_bytes;
  if (trims_.later) trim_at(now + limits_.idle_for);
}

void Blocks::unmapped(std::uint32_t slot, const std::string& why) {
  const std::lock_guard lock(mutex_);
  auto* const segment = slot < segments_.size() ? segments_[slot].get() : nullptr;
  if (segment == nullptr || segment->spent > 0) return;
  auto& of_size = classes_[segment->index];
  of_size.failure = formatted("{} cannot map more shared memory: {}", wire_.peer(), why);
  of_size.retry_at = Clock::now() + retry_after;
  // Blocks that are out will not be returned, and the others must not be lent.
  std::erase(of_size.open, segment);
  usage_->idle.fetch_sub(segment->free.size() * segment->geometry.block_bytes, std::memory_order_relaxed);
  segment->free.clear();
  ++segment->spent;
  if (segment->idle()) retire(slot);
}

bool Blocks::answered(std::uint64_t nonce) const {
  return word_at(ledger_, Ledger::answer_at).load(std::memory_order_acquire) == ~nonce;
}

void Blocks::close() noexcept {
  std::vector<std::shared_ptr<Segment>> segments;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    ended_.store(true, std::memory_order_relaxed);
    segments.swap(segments_);
    for (auto& of_size : classes_) of_size.open.clear();
    for (const auto& segment : segments) {
      if (segment == nullptr) continue;
      usage_->held.fetch_sub(segment->lent * segment->geometry.block_bytes, std::memory_order_relaxed);
      usage_->idle.fetch_sub(segment->free.size() * segment->geometry.block_bytes, std::memory_order_relaxed);
    }
  }
  background_.submit([segments = std::move(segments)]() mutable { segments.clear(); });
}

}  // namespace tensorferry::shm
