/// The page-locked ring through which one end of a cuda_basic channel sends to the other end on the same host.
#pragma once

#include <cstdint>

#include "channels/cuda/pinned.h"
#include "channels/cuda_basic/transfer.h"

namespace tensorferry::cuda_basic {

/// Chunks are counted over all transfers of the direction. Chunk c uses slot c % slots and the value c / slots + 1:
///
/// 1. The sender waits until the slot's word `free` has reached value - 1, fills the slot, and sets `ready` to value.
/// 2. The receiver waits until `ready` has reached the value, empties the slot, and sets `free` to it.
///
/// The hosts wait, not the streams. A host sets a word when its GPU has copied the chunk.
struct Ring {
  static constexpr std::size_t slots = 8;
  static constexpr std::size_t slot_bytes = most_chunk_bytes;
  static constexpr std::size_t header = 4096;
  static constexpr std::size_t bytes = header + slots * slot_bytes;
  static constexpr std::size_t word_bytes = 64;  // each word has a cache line of its own

  cuda::Pinned memory;

  struct Chunk {
    std::size_t slot;
    std::uint32_t value;
  };
  /// Sets the words as if all chunks before `first` had passed. Call before the peer maps the ring.
  void begin_at(std::uint64_t first) const {
    for (auto number = first; number < first + slots; ++number) {
      const auto at = chunk(number);
      ready(at.slot).set(at.value - 1);
      free(at.slot).set(at.value - 1);
    }
  }
  /// Returns whether the receiver has emptied all slots that chunks before `next` used.
  [[nodiscard]] bool emptied(std::uint64_t next) const {
    for (auto number = next; number < next + slots; ++number) {
      const auto at = chunk(number);
      if (!free(at.slot).reached(at.value - 1)) return false;
    }
    return true;
  }
  static Chunk chunk(std::uint64_t number) { return {number % slots, static_cast<std::uint32_t>(number / slots + 1)}; }
  [[nodiscard]] cuda::Word ready(std::size_t slot) const { return cuda::word_at(memory, slot * word_bytes); }
  [[nodiscard]] cuda::Word free(std::size_t slot) const { return cuda::word_at(memory, (slots + slot) * word_bytes); }
  [[nodiscard]] std::byte* data(std::size_t slot) const { return memory.data() + header + slot * slot_bytes; }
  [[nodiscard]] CUdeviceptr on_device(std::size_t slot) const { return memory.on_device(header + slot * slot_bytes); }
};

}  // namespace tensorferry::cuda_basic
