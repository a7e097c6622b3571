/// The words that two processes share in memory, and the descriptor, tickets and control messages of `shm`.
/// docs/protocol.md, "Shared blocks", is normative.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "base/record.h"
#include "base/shared_memory.h"
#include "channels/empty_buffer.h"
#include "channels/size_class.h"

namespace tensorferry::shm {

inline constexpr std::size_t page = 4096;

/// The number of slots. A slot is the sender's number for one segment; after a Drop the sender may use it again.
inline constexpr std::uint32_t most_slots = 1 << 14;  // a process may have 65530 mappings (vm.max_map_count)

/// How many regions one sender may have handed over at a time.
inline constexpr std::size_t most_regions = 1 << 14;

/// The layout of a segment: `blocks` blocks of `block_bytes`, then one word per block, rounded up to a page.
struct Geometry {
  static constexpr std::uint32_t most_blocks = 1 << 11;

  std::uint64_t block_bytes = 0;
  std::uint32_t blocks = 0;
  static constexpr std::tuple fields{varint(&Geometry::block_bytes), varint(&Geometry::blocks)};

  /// Returns whether a peer's numbers are within the protocol's bounds.
  [[nodiscard]] bool valid() const {
    return blocks > 0 && blocks <= most_blocks && block_bytes >= page && block_bytes <= size_class::largest &&
           block_bytes % 1024 == 0;
  }
  [[nodiscard]] std::uint64_t words_at() const { return block_bytes * blocks; }
  [[nodiscard]] std::uint64_t bytes() const {
    return (words_at() + blocks * sizeof(std::uint64_t) + page - 1) / page * page;
  }
};

/// Identifies one lending of one block. Successive lendings of a block have different generations.
struct Lending {
  static constexpr std::uint8_t tag = 1;
  static constexpr std::uint32_t generations = 1U << 31;

  std::uint32_t slot = 0;
  std::uint32_t block = 0;
  std::uint32_t generation = 0;
  static constexpr std::tuple fields{varint(&Lending::slot), varint(&Lending::block), &Lending::generation};
  [[nodiscard]] bool valid() const {
    return slot < most_slots && block < Geometry::most_blocks && generation < generations;
  }

  /// Returns slot and block in one number, which is never 0.
  [[nodiscard]] std::uint32_t number() const { return slot * Geometry::most_blocks + block + 1; }
};

/// The word of a block that the receiver has returned.
struct Returned {
  std::uint32_t next = 0;        // number() of the block that was returned before this one; 0: none
  std::uint32_t generation = 0;  // of the lending that has ended
  bool spent = false;            // a forked child of the receiver still sees the block: the sender must not reuse it

  [[nodiscard]] std::uint64_t word() const {
    return next | std::uint64_t{generation} << 32 | std::uint64_t{spent ? 1U : 0U} << 63;
  }
  static Returned of(std::uint64_t word) {
    return {static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32) & (Lending::generations - 1),
            word >> 63 != 0};
  }
};

using Word = std::atomic_ref<std::uint64_t>;
static_assert(Word::is_always_lock_free, "other processes would not see the lock");

/// Returns a word of shared memory; `offset` must be a multiple of 8 and lie inside.
inline Word word_at(const SharedMemory& memory, std::size_t offset) {
  return Word(*reinterpret_cast<std::uint64_t*>(memory.data() + offset));
}

/// One page for each direction, which the sender creates.
struct Ledger {
  static constexpr std::size_t bytes = page;
  static constexpr std::size_t nonce_at = 0;
  static constexpr std::size_t answer_at = 8;     // written by the receiver: the complement of the nonce
  static constexpr std::size_t returned_at = 64;  // number() of the block that was returned last; 0: none
  static constexpr std::size_t core_at = 72;      // written by the receiver: current_core() at its last return; a hint
};

/// Returns the number of the core on which this thread runs, plus 1; 0: unknown.
inline std::uint64_t current_core() noexcept { return static_cast<std::uint64_t>(::sched_getcpu()) + 1; }

/// The channel's descriptor. Its tag is the version of these records and of the memory's layout.
struct ShmDescriptor {
  static constexpr std::uint8_t tag = 1;
  std::uint32_t uid = 0;
  std::string_view boot_id;
  static constexpr std::tuple fields{&ShmDescriptor::uid, &ShmDescriptor::boot_id};
};

/// The content of a ticket.
struct Handed {  // a buffer in a region, which both sides go on using
  static constexpr std::uint8_t tag = 2;
  std::uint64_t region = 0;
  std::uint64_t offset = 0;
  static constexpr std::tuple fields{varint(&Handed::region), varint(&Handed::offset)};
};
using ShmTicket = std::variant<EmptyBuffer, Lending, Handed>;

/// Control messages.
inline constexpr std::size_t longest_reason = 1024;
struct LedgerOffer {  // with a descriptor: the ledger
  static constexpr std::uint8_t tag = 1;
  std::uint64_t nonce = 0;
  static constexpr std::tuple fields{&LedgerOffer::nonce};
};
struct LedgerProbed {  // the answer to Hello
  static constexpr std::uint8_t tag = 2;
  std::string failure;  // empty: the receiver has read the nonce and answered it
  static constexpr std::tuple fields{at_most(&LedgerProbed::failure, longest_reason)};
};
struct Segment {  // with a descriptor: the segment's memory
  static constexpr std::uint8_t tag = 3;
  std::uint32_t slot = 0;
  Geometry geometry;
  static constexpr std::tuple fields{varint(&Segment::slot), &Segment::geometry};
  [[nodiscard]] bool valid() const { return slot < most_slots; }
};
struct Handover {  // with a descriptor: the region's memory
  static constexpr std::uint8_t tag = 4;
  std::uint64_t region = 0;  // the sender's number, which it uses for no other region
  std::uint64_t bytes = 0;
  static constexpr std::tuple fields{varint(&Handover::region), varint(&Handover::bytes)};
  [[nodiscard]] bool valid() const { return bytes > 0 && bytes <= size_class::largest; }
};
struct SegmentDropped {  // the sender no longer uses the slot
  static constexpr std::uint8_t tag = 5;
  std::uint32_t slot = 0;
  static constexpr std::tuple fields{varint(&SegmentDropped::slot)};
  [[nodiscard]] bool valid() const { return slot < most_slots; }
};
struct Unmapped {  // from the receiver: it could not map the slot
  static constexpr std::uint8_t tag = 6;
  std::uint32_t slot = 0;
  std::string why;
  static constexpr std::tuple fields{varint(&Unmapped::slot), at_most(&Unmapped::why, longest_reason)};
  [[nodiscard]] bool valid() const { return slot < most_slots; }
};
struct RegionEnded {  // the region has ended at the sender, which sends no more tickets for it
  static constexpr std::uint8_t tag = 7;
  std::uint64_t region = 0;
  std::uint64_t tickets = 0;  // how many were sent in all: the receiver keeps the region until all have come
  static constexpr std::tuple fields{varint(&RegionEnded::region), varint(&RegionEnded::tickets)};
};
struct Missed {  // from the receiver: it could not map the region
  static constexpr std::uint8_t tag = 8;
  std::uint64_t region = 0;
  std::string why;
  static constexpr std::tuple fields{varint(&Missed::region), at_most(&Missed::why, longest_reason)};
};
using Control =
    std::variant<LedgerOffer, LedgerProbed, Segment, Handover, SegmentDropped, Unmapped, RegionEnded, Missed>;

}  // namespace tensorferry::shm
