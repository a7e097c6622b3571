/// What two processes share: the words in their common memory, tickets and control messages. docs/protocol.md,
/// "Shared blocks", is normative.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "channels/bytes.h"
#include "channels/shared_memory.h"
#include "channels/size_class.h"

namespace tensorferry::shm {

inline constexpr std::uint8_t layout_version = 1;
inline constexpr std::size_t page = 4096;

/// Memory of the sender's, numbered in the order of its choice; a number is used again after the memory is dropped.
inline constexpr std::uint32_t most_slots = 1 << 14;  // a process may have 65530 mappings (vm.max_map_count)

/// Regions that one sender may have handed over at a time.
inline constexpr std::size_t most_regions = 1 << 14;

/// A segment's memory: `blocks` blocks of `block_bytes`, then a word for each of them, rounded up to a page.
struct Geometry {
  static constexpr std::uint32_t most_blocks = 1 << 11;

  std::uint64_t block_bytes = 0;
  std::uint32_t blocks = 0;

  /// Whether a peer's numbers make sense.
  [[nodiscard]] bool valid() const {
    return blocks > 0 && blocks <= most_blocks && block_bytes >= page && block_bytes <= size_class::largest &&
           block_bytes % 1024 == 0;
  }
  [[nodiscard]] std::uint64_t words_at() const { return block_bytes * blocks; }
  [[nodiscard]] std::uint64_t bytes() const {
    return (words_at() + blocks * sizeof(std::uint64_t) + page - 1) / page * page;
  }
};

/// One lending of one block. The generation differs from one lending of the block to the next.
struct Lending {
  static constexpr std::uint32_t generations = 1U << 31;

  std::uint32_t slot = 0;
  std::uint32_t block = 0;
  std::uint32_t generation = 0;

  /// Slot and block in one number, not 0.
  [[nodiscard]] std::uint32_t number() const { return slot * Geometry::most_blocks + block + 1; }
};

/// The word of a block that the receiver has given back.
struct Returned {
  std::uint32_t next = 0;        // number() of the block given back before; 0: none
  std::uint32_t generation = 0;  // that was given back
  bool spent = false;            // a forked child of the receiver still sees it: not to be used again

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

/// A word of shared memory; `offset` is a multiple of 8 and inside.
inline Word word_at(const SharedMemory& memory, std::size_t offset) {
  return Word(*reinterpret_cast<std::uint64_t*>(memory.data() + offset));
}

/// One page for each direction, made by the sender.
struct Ledger {
  static constexpr std::size_t bytes = page;
  static constexpr std::size_t nonce_at = 0;
  static constexpr std::size_t answer_at = 8;     // the receiver's: the complement of the nonce
  static constexpr std::size_t returned_at = 64;  // number() of the block given back last; 0: none
};

/// What a ticket says.
struct Nothing {};  // an empty buffer
struct Handed {     // memory that both sides go on using
  std::uint64_t region;
  std::uint64_t offset;
};
using Place = std::variant<Nothing, Lending, Handed>;
Bytes encode(const Place& place);
/// nullopt: it makes no sense.
std::optional<Place> place_of(ByteView ticket);

/// Control messages.
struct Hello {  // + descriptor: the ledger
  std::uint64_t nonce;
};
struct Probed {         // the answer to Hello
  std::string failure;  // empty: the nonce was read and answered
};
struct Segment {  // + descriptor
  std::uint32_t slot;
  Geometry geometry;
};
struct Handover {        // + descriptor
  std::uint64_t region;  // as the sender numbers them; a number is not used for another one
  std::uint64_t bytes;
};
struct Drop {  // the slot is not used any more
  std::uint32_t slot;
};
struct Unmapped {  // the receiver could not map the slot
  std::uint32_t slot;
  std::string why;
};
struct Gone {  // the sender has let go of the region, and hands it over no more
  std::uint64_t region;
  std::uint64_t tickets;  // that were sent of it, ever: the receiver keeps it until all have come
};
struct Missed {  // the receiver could not map the region
  std::uint64_t region;
  std::string why;
};
using Control = std::variant<Hello, Probed, Segment, Handover, Drop, Unmapped, Gone, Missed>;
Bytes encode(const Control& control);
std::optional<Control> control_of(ByteView message);

}  // namespace tensorferry::shm
