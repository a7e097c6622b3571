/// Blocks of bytes that go around the ring of a group's ranks: each rank passes them on to the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

namespace tensorferry::collectives {

/// What one rank does while blocks go around. It sends its own block, if it has one, to the next rank. It passes on
/// each block that arrives from the rank before it. Blocks travel in chunks: a rank passes on a chunk as soon as it has
/// it.
struct RingPass {
  static constexpr std::size_t chunk_bytes = std::size_t{512} << 10;  // at most

  std::size_t most_bytes = 0;                       // of a block; all ranks say the same
  std::size_t most_sent = 0;                        // blocks that a rank sends at most; all ranks say the same
  std::optional<std::span<const std::byte>> first;  // this rank's own block
  std::size_t arriving = 0;                         // how many blocks arrive, numbered from 0
  bool sends_last = false;                          // whether the last of them goes on too
  /// Returns where block `block` goes when it arrives.
  std::function<std::span<std::byte>(std::size_t block)> arrives;
  /// Runs when bytes [begin, end) of the block have arrived. May be empty.
  std::function<void(std::size_t block, std::size_t begin, std::size_t end)> arrived;
  /// Returns what goes on in the place of the block: as many bytes. Each chunk is read after `arrived` has run for it,
  /// until the operation has ended.
  std::function<std::span<const std::byte>(std::size_t block)> leaves;
};

/// Messages of a ring have numbers from here on; those of steps have smaller ones.
inline constexpr std::uint64_t ring_letters = std::uint64_t{1} << 62U;

}  // namespace tensorferry::collectives
