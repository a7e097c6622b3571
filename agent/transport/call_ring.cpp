#include "agent/transport/call_ring.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>
#include <utility>

#include "agent/transport/two_views.h"
#include "agent/wire/frame.h"
#include "base/futex.h"

namespace tensorferry {
namespace {

using State = CallRing::State;

constexpr std::uint32_t generation_mask = (1U << 28) - 1;

constexpr std::uint32_t word_of(SlotId slot, State state) {
  return slot.generation << 4 | static_cast<std::uint32_t>(state);
}
constexpr State state_of(std::uint32_t word) { return static_cast<State>(word & 0xf); }
constexpr bool is_of(std::uint32_t word, SlotId slot) { return word >> 4 == slot.generation; }

/// Precedes each request in the ring.
struct Entry {
  std::uint32_t length;
  std::uint32_t slot;
  std::uint32_t generation;
  std::int32_t cpu;
};

constexpr std::size_t padded(std::size_t bytes) { return (bytes + 15) & ~std::size_t{15}; }

}  // namespace

CallRing::CallRing(SharedMemory memory)
    : memory_(std::move(memory)), shared_(*std::launder(reinterpret_cast<Layout*>(memory_.data()))) {
  for (std::uint32_t i = 0; i < slots; ++i) free_[i] = slots - 1 - i;  // low indices come first: fewer pages in use
}

Result<std::shared_ptr<CallRing>> CallRing::create(std::uint64_t nonce) {
  auto memory = SharedMemory::create(sizeof(Layout));
  if (!memory) return memory.status();
  auto ring = std::shared_ptr<CallRing>(new CallRing(std::move(*memory)));
  ring->shared_.nonce = nonce;
  return ring;
}

Result<std::shared_ptr<CallRing>> CallRing::map(FileDescriptor fd, std::uint64_t nonce) {
  auto memory = SharedMemory::map(std::move(fd), sizeof(Layout));
  if (!memory) return memory.status();
  auto ring = std::shared_ptr<CallRing>(new CallRing(std::move(*memory)));
  if (ring->shared_.nonce != nonce) return Status(Code::protocol_error, "shared memory of another link");
  return ring;
}

// ---- Caller

std::optional<SlotId> CallRing::reserve() {
  SlotId slot;
  {
    const std::lock_guard lock(slot_mutex_);
    if (free_count_ == 0) return std::nullopt;
    slot.index = free_[--free_count_];
    slot.generation = generations_[slot.index] = (generations_[slot.index] + 1) & generation_mask;
  }
  shared_.slot[slot.index].word.store(word_of(slot, State::pending), std::memory_order_relaxed);  // push() publishes
  return slot;
}

void CallRing::release(std::uint32_t index) {
  const std::lock_guard lock(slot_mutex_);
  free_[free_count_++] = index;
}

/// Ends the slot's call: true for one thread alone, which must then release() the slot. False: the call has lost the
/// slot, or has given it up, and reclaim() frees it. Under slot_mutex_. Decides by this side's memory alone, because
/// the callee may write any state, at any time, into the word of any slot.
bool CallRing::end_call(SlotId slot) {
  auto& generation = generations_[slot.index];
  if (generation != slot.generation || abandoned_[slot.index]) return false;
  generation = (slot.generation + 1) & generation_mask;
  return true;
}

void CallRing::unreserve(SlotId slot) {
  {
    const std::lock_guard lock(slot_mutex_);
    if (!end_call(slot)) return;
  }
  shared_.slot[slot.index].word.store(word_of(slot, State::free), std::memory_order_relaxed);
  release(slot.index);
}

void CallRing::give_back_if_idle() {
  const auto head = shared_.head.load(std::memory_order_relaxed);
  if (head != std::exchange(last_head_, head)) {
    gave_back_ = false;
    return;
  }
  if (gave_back_) return;
  const std::scoped_lock lock(push_mutex_, slot_mutex_);
  const bool empty = shared_.head.load(std::memory_order_relaxed) == shared_.tail.load(std::memory_order_acquire);
  if (!empty || free_count_ != slots || abandoned_count_ != 0) return;
  // The words of free slots become 0: generation 0, which no call has.
  constexpr std::size_t page = 4096;
  const auto remove = [](std::byte* begin, std::byte* end) {
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    auto* const first = begin + (page - address % page) % page;
    if (first < end) ::madvise(first, static_cast<std::size_t>(end - first) / page * page, MADV_REMOVE);
  };
  remove(shared_.ring.data(), shared_.ring.data() + shared_.ring.size());
  auto* const replies = reinterpret_cast<std::byte*>(shared_.slot.data());
  remove(replies, replies + sizeof shared_.slot);
  gave_back_ = true;
}

void CallRing::copy_in(std::uint64_t at, ByteView bytes) {
  const auto begin = at % ring_bytes;
  const auto first = std::min(bytes.size(), ring_bytes - begin);
  std::memcpy(shared_.ring.data() + begin, bytes.data(), first);
  std::memcpy(shared_.ring.data(), bytes.data() + first, bytes.size() - first);
}

void CallRing::copy_out(std::uint64_t at, std::span<std::byte> into) const {
  if (into.empty()) return;  // memcpy forbids a null pointer even for 0 bytes
  const auto begin = at % ring_bytes;
  const auto first = std::min(into.size(), ring_bytes - begin);
  std::memcpy(into.data(), shared_.ring.data() + begin, first);
  std::memcpy(into.data() + first, shared_.ring.data(), into.size() - first);
}

bool CallRing::push(SlotId slot, ByteView frame) {
  const Entry entry{static_cast<std::uint32_t>(frame.size()), slot.index, slot.generation, ::sched_getcpu()};
  const auto needed = sizeof entry + padded(frame.size());
  const std::lock_guard lock(push_mutex_);
  const auto head = shared_.head.load(std::memory_order_relaxed);
  const auto used = head - shared_.tail.load(std::memory_order_acquire);
  if (used > ring_bytes || needed > ring_bytes - used) return false;  // used > ring_bytes: the callee wrote a bad tail
  copy_in(head, std::as_bytes(std::span(&entry, 1)));
  copy_in(head + sizeof entry, frame);
  TwoViews::publishes(shared_.nonce, slot.index);
  shared_.head.store(head + needed, std::memory_order_seq_cst);  // the caller reads the doorbell's counts after this
  return true;
}

CallRing::State CallRing::state(SlotId slot) const {
  const auto word = shared_.slot[slot.index].word.load(std::memory_order_acquire);
  return is_of(word, slot) ? state_of(word) : State::free;
}

bool CallRing::sleep(SlotId slot, std::optional<Clock::time_point> until, const Clock& clock) {
  auto& word = shared_.slot[slot.index].word;
  const auto sleeping = word_of(slot, State::sleeping);
  auto seen = word.load(std::memory_order_acquire);
  while (seen == word_of(slot, State::pending) || seen == word_of(slot, State::watched)) {
    if (word.compare_exchange_weak(seen, sleeping, std::memory_order_seq_cst)) seen = sleeping;
  }
  if (seen != sleeping) return true;
  return clock.shared_wait(word, sleeping, until);
}

void CallRing::stop_sleeping(SlotId slot) {
  auto& word = shared_.slot[slot.index].word;
  auto expected = word_of(slot, State::sleeping);
  if (word.compare_exchange_strong(expected, word_of(slot, State::pending), std::memory_order_seq_cst))
    shared_futex_wake(word, INT_MAX);
}

bool CallRing::watch(SlotId slot) {
  auto expected = word_of(slot, State::pending);
  return shared_.slot[slot.index].word.compare_exchange_strong(expected, word_of(slot, State::watched),
                                                               std::memory_order_seq_cst);
}

std::optional<Bytes> CallRing::take(SlotId slot, bool& valid) {
  auto& place = shared_.slot[slot.index];
  valid = true;
  if (place.word.load(std::memory_order_acquire) != word_of(slot, State::full)) return std::nullopt;
  const auto length = place.length.load(std::memory_order_relaxed);  // read once, because the peer may change it
  valid = length <= most_reply;
  Bytes frame;
  frame.reserve(valid ? length : 0);  // before the call is taken: without memory nothing changes
  {
    const std::lock_guard lock(slot_mutex_);
    if (place.word.load(std::memory_order_acquire) != word_of(slot, State::full) || !end_call(slot))
      return std::nullopt;
  }
  TwoViews::has_taken(shared_.nonce, slot.index);
  frame.assign(place.bytes.begin(), place.bytes.begin() + (valid ? length : 0));
  release(slot.index);
  if (!valid) return std::nullopt;
  return frame;
}

bool CallRing::taken(SlotId slot) {
  const std::lock_guard lock(slot_mutex_);
  return generations_[slot.index] != slot.generation;
}

void CallRing::take_by_socket(SlotId slot) {
  {
    const std::lock_guard lock(slot_mutex_);
    if (!end_call(slot)) return;
  }
  release(slot.index);
}

std::optional<Bytes> CallRing::abandon(SlotId slot, bool& valid) {
  valid = true;
  auto& word = shared_.slot[slot.index].word;
  auto seen = word.load(std::memory_order_acquire);
  while (is_of(seen, slot) &&
         (state_of(seen) == State::pending || state_of(seen) == State::sleeping || state_of(seen) == State::watched)) {
    if (!word.compare_exchange_weak(seen, word_of(slot, State::abandoned), std::memory_order_seq_cst)) continue;
    if (state_of(seen) == State::sleeping) shared_futex_wake(word, INT_MAX);
    const std::lock_guard lock(slot_mutex_);
    if (generations_[slot.index] != slot.generation) return std::nullopt;  // the callee has lied: the answer was taken
    if (!std::exchange(abandoned_[slot.index], true)) ++abandoned_count_;
    return std::nullopt;
  }
  // The callee answered in the same moment.
  if (!is_of(seen, slot)) return std::nullopt;
  if (state_of(seen) == State::by_socket) take_by_socket(slot);
  return state_of(seen) == State::full ? take(slot, valid) : std::nullopt;
}

void CallRing::reclaim() {
  const std::lock_guard lock(slot_mutex_);
  for (std::uint32_t i = 0; i < slots && abandoned_count_ != 0; ++i) {
    // The peer can write the word too, so this frees only slots that this side has abandoned.
    auto& word = shared_.slot[i].word;
    if (!abandoned_[i] || state_of(word.load(std::memory_order_acquire)) != State::late) continue;
    abandoned_[i] = false;
    --abandoned_count_;
    word.store(0, std::memory_order_relaxed);
    generations_[i] = (generations_[i] + 1) & generation_mask;
    free_[free_count_++] = i;
  }
}

void CallRing::wake_all() {
  for (auto& slot : shared_.slot) {
    if (slot.word.load(std::memory_order_relaxed) != 0) shared_futex_wake(slot.word, INT_MAX);
  }
}

bool CallRing::any_done() const {
  return shared_.done_head.load(std::memory_order_seq_cst) != shared_.done_tail.load(std::memory_order_relaxed);
}

std::optional<SlotId> CallRing::next_done() {
  const auto head = shared_.done_head.load(std::memory_order_acquire);
  auto tail = shared_.done_tail.load(std::memory_order_relaxed);
  if (head == tail) return std::nullopt;
  if (head - tail > slots) tail = head - slots;  // the others have been overwritten
  const auto entry = shared_.done[tail % slots].load(std::memory_order_relaxed);
  shared_.done_tail.store(tail + 1, std::memory_order_release);
  const SlotId slot{static_cast<std::uint32_t>(entry), static_cast<std::uint32_t>(entry >> 32)};
  if (slot.index >= slots) return SlotId{0, ~0U};  // a bad entry: no call has this generation
  return slot;
}

// ---- Callee

bool CallRing::empty() const {
  return shared_.head.load(std::memory_order_seq_cst) == shared_.tail.load(std::memory_order_relaxed);
}

std::optional<std::uint32_t> CallRing::peek_function() {
  const std::lock_guard lock(pop_mutex_);
  if (empty()) return std::nullopt;
  std::array<std::byte, sizeof(std::uint32_t)> bytes{};
  copy_out(shared_.tail.load(std::memory_order_relaxed) + sizeof(Entry) + offsetof(wire::Header, function), bytes);
  std::uint32_t number = 0;
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

std::optional<CallRing::Request> CallRing::pop(std::span<std::byte> into, bool& valid) {
  valid = true;
  const std::unique_lock lock(pop_mutex_, std::try_to_lock);
  if (!lock) return std::nullopt;
  const auto tail = shared_.tail.load(std::memory_order_relaxed);
  const auto used = shared_.head.load(std::memory_order_acquire) - tail;
  if (used == 0) return std::nullopt;
  Entry entry{};
  copy_out(tail, std::as_writable_bytes(std::span(&entry, 1)));
  const auto whole = sizeof entry + padded(entry.length);
  valid = used <= ring_bytes && whole <= used && entry.length <= into.size() && entry.slot < slots;
  if (!valid) return std::nullopt;
  TwoViews::has_taken(shared_.nonce, entry.slot);
  copy_out(tail + sizeof entry, into.first(entry.length));
  shared_.tail.store(tail + whole, std::memory_order_release);
  return Request{{entry.slot, entry.generation & generation_mask}, entry.length, entry.cpu};
}

CallRing::Answered CallRing::change(SlotId slot, State to) {
  auto& word = shared_.slot[slot.index].word;
  auto seen = word.load(std::memory_order_acquire);
  while (is_of(seen, slot)) {
    const auto was = state_of(seen);
    const bool open = was == State::pending || was == State::sleeping || was == State::watched;
    if (!open && was != State::abandoned) break;
    if (!word.compare_exchange_weak(seen, word_of(slot, open ? to : State::late), std::memory_order_seq_cst)) continue;
    if (was == State::sleeping) shared_futex_wake(word, INT_MAX);
    if (was != State::watched) return open ? Answered::quietly : Answered::too_late;
    const std::lock_guard lock(done_mutex_);
    const auto head = shared_.done_head.load(std::memory_order_relaxed);
    shared_.done[head % slots].store(std::uint64_t{slot.generation} << 32 | slot.index, std::memory_order_relaxed);
    shared_.done_head.store(head + 1, std::memory_order_seq_cst);
    return Answered::must_ring;
  }
  return Answered::too_late;
}

CallRing::Answered CallRing::answer(SlotId slot, ByteView frame) {
  auto& place = shared_.slot[slot.index];
  const auto seen = place.word.load(std::memory_order_acquire);
  if (!is_of(seen, slot)) return Answered::too_late;
  if (state_of(seen) != State::abandoned) {
    place.cpu.store(::sched_getcpu(), std::memory_order_relaxed);
    place.length.store(static_cast<std::uint32_t>(frame.size()), std::memory_order_relaxed);
    std::memcpy(place.bytes.data(), frame.data(), frame.size());
  }
  TwoViews::publishes(shared_.nonce, slot.index);
  return change(slot, State::full);
}

CallRing::Answered CallRing::answer_by_socket(SlotId slot) { return change(slot, State::by_socket); }

}  // namespace tensorferry
