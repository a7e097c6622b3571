#include "rpc/collectives/board.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

namespace tensorferry::collectives {
namespace {

std::size_t rounded_up(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
std::size_t head_bytes(std::size_t ranks) { return rounded_up(sizeof(Announcement) + ranks * sizeof(Part)); }
std::size_t stream_bytes(std::size_t ranks) {
  return Board::words_bytes + ranks * Board::gpu_slots * Board::gpu_slot_bytes;
}
std::size_t entry_bytes(std::size_t ranks) { return head_bytes(ranks) + Board::slot_bytes; }

}  // namespace

Status why_ended(const WaitLimits& limits) {
  if (auto failed = limits.failed(); !failed.ok()) return failed;
  if (limits.interrupted && limits.interrupted()) return interruption();
  if (limits.clock.now() >= limits.until) return {Code::deadline_exceeded, ""};
  return {};
}

std::size_t Board::bytes_for(std::size_t ranks) noexcept {
  const auto bytes = ranks * sizeof(Flags) + ranks * 2 * entry_bytes(ranks);
  if (ranks > most_ranks_with_words) return bytes;
  return (bytes + words_bytes - 1) / words_bytes * words_bytes + stream_bytes(ranks);
}

Buffer Board::stream_words() const {
  Buffer out;
  if (ranks_ > most_ranks_with_words) return out;
  out.bytes = stream_bytes(ranks_);
  out.data = memory_.data + bytes_for(ranks_) - out.bytes;
  out.owner = memory_.owner;
  return out;
}

Board::Board(Buffer memory, std::size_t rank, std::size_t ranks)
    : memory_(std::move(memory)),
      rank_(rank),
      ranks_(ranks),
      spins_for_(ranks <= std::thread::hardware_concurrency() ? woken_after : std::chrono::nanoseconds(0)) {}

Board::Flags& Board::flags(std::size_t rank) const {
  return *reinterpret_cast<Flags*>(memory_.data + rank * sizeof(Flags));
}

std::byte* Board::entry(std::size_t rank, std::uint64_t step) const {
  return memory_.data + ranks_ * sizeof(Flags) + (rank * 2 + (step & 1U)) * entry_bytes(ranks_);
}

Result<std::byte*> Board::slot(std::uint64_t step, const WaitLimits& limits) {
  if (step > 2) {
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      if (rank == rank_) continue;
      if (auto status = await_done(rank, step - 2, limits); !status.ok()) return status;
    }
  }
  return entry(rank_, step) + head_bytes(ranks_);
}

void Board::announce(std::uint64_t step, const Announcement& announcement, std::span<const Part> parts) {
  auto* const head = entry(rank_, step);
  std::memcpy(head, &announcement, sizeof announcement);
  if (!parts.empty()) std::memcpy(head + sizeof announcement, parts.data(), parts.size_bytes());
  flags(rank_).announced.store(step, std::memory_order_seq_cst);
  ring_sleepers();
}

// A sleeper stores `sleeping` before it reads the flags, and this rank stores a flag before it reads `sleeping`. So one
// of the two sees the other's store: all four are sequentially consistent (tests/models/board.pml).
void Board::ring_sleepers() {
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    auto& other = flags(rank);
    if (rank == rank_ || other.sleeping.load(std::memory_order_seq_cst) == 0) continue;
    other.bell.fetch_add(1, std::memory_order_seq_cst);
    shared_futex_wake(other.bell, 1);
  }
}

void Board::wake() {
  flags(rank_).bell.fetch_add(1, std::memory_order_seq_cst);
  shared_futex_wake(flags(rank_).bell, 1);
}

Status Board::wait_for(const std::atomic<std::uint64_t>& flag, std::uint64_t step, const WaitLimits& limits) {
  const auto reached = [&] { return flag.load(std::memory_order_seq_cst) >= step; };
  if (reached() || spin_.until(reached, spins_for_)) return {};
  auto& mine = flags(rank_);
  for (;;) {
    const auto heard = mine.bell.load(std::memory_order_seq_cst);
    mine.sleeping.store(1, std::memory_order_seq_cst);
    // The flag goes first: a rank that has announced its step may leave at once.
    auto ended = reached() ? Status() : why_ended(limits);
    if (reached() || !ended.ok()) {
      mine.sleeping.store(0, std::memory_order_relaxed);
      return reached() ? Status() : ended;
    }
    limits.clock.shared_wait(mine.bell, heard, std::min(limits.until, limits.clock.now() + longest_sleep));
    mine.sleeping.store(0, std::memory_order_relaxed);
    if (reached()) return {};
  }
}

Status Board::await(std::size_t rank, std::uint64_t step, const WaitLimits& limits) {
  return wait_for(flags(rank).announced, step, limits);
}
Status Board::await_done(std::size_t rank, std::uint64_t step, const WaitLimits& limits) {
  return wait_for(flags(rank).done, step, limits);
}

bool Board::announced(std::size_t rank, std::uint64_t step) const {
  return flags(rank).announced.load(std::memory_order_seq_cst) >= step;
}

Announcement Board::announcement(std::size_t rank, std::uint64_t step) const {
  Announcement out;
  std::memcpy(&out, entry(rank, step), sizeof out);
  return out;
}

Part Board::part(std::size_t rank, std::uint64_t step, std::size_t to) const {
  Part out;
  std::memcpy(&out, entry(rank, step) + sizeof(Announcement) + to * sizeof(Part), sizeof out);
  return out;
}

const std::byte* Board::slot_of(std::size_t rank, std::uint64_t step) const {
  return entry(rank, step) + head_bytes(ranks_);
}

void Board::done(std::uint64_t step) {
  flags(rank_).done.store(step, std::memory_order_seq_cst);
  ring_sleepers();
}

// A reader that sees a later write of the bytes sees the withdrawal too, because of the two fences.
void Board::withdraw(std::uint64_t step) {
  flags(rank_).withdrawn.store(step, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

bool Board::withdrawn(std::size_t rank, std::uint64_t step) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return flags(rank).withdrawn.load(std::memory_order_relaxed) == step;
}

}  // namespace tensorferry::collectives
