/// What a rank gives and takes in an operation on memory of GPUs, as spans of bytes, and how they are cut into chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "rpc/collectives/cuda/direct.h"

namespace tensorferry::collectives::cuda {

using InBytes = DeviceOperations::InBytes;
using OutBytes = DeviceOperations::OutBytes;

inline constexpr std::size_t alignment = 16;  // what kernels read at once
inline constexpr std::size_t half_bytes = SymmetricBuffers::half_bytes;

inline bool is_aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % alignment == 0; }

/// Returns the bytes of a chunk of `bytes` bytes that `rank` reduces for all: [first, second). Shares begin at
/// multiples of 16 bytes.
std::pair<std::size_t, std::size_t> share_of_bytes(std::size_t rank, std::size_t ranks, std::size_t bytes);

/// Returns the largest of the sizes.
std::size_t largest(const auto& pieces) {
  std::size_t out = 0;
  for (const auto& piece : pieces) out = std::max(out, piece.size());
  return out;
}

template <class Byte>
std::span<Byte> part_of(std::span<Byte> bytes, std::size_t at, std::size_t most) {
  at = std::min(at, bytes.size());
  return bytes.subspan(at, std::min(most, bytes.size() - at));
}

/// Returns whether an input lies over an output of another index, or over its own at another address.
bool overlap(const std::vector<InBytes>& inputs, const std::vector<OutBytes>& outputs);

/// Returns the input if the other ranks may read it in place while this one writes its output; else nothing. In two
/// shots they may if the output is the input itself, because each share is read by the rank alone that writes it at
/// first.
InBytes lendable(InBytes input, OutBytes output, bool two_shots);

/// What a rank gives and takes in an exchange of pieces, by rank. Empty pieces are neither given nor taken.
struct Pieces {
  std::vector<InBytes> given;
  std::vector<OutBytes> taken;
  bool one_for_all = false;  // `given` has one piece, at the index of this rank, for every rank that takes it
  std::size_t most = 0;      // bytes of the largest piece of all ranks

  explicit Pieces(std::size_t ranks) : given(ranks), taken(ranks) {}

  /// Returns the whole input if the other ranks may read it in place while `rank`, whose pieces these are, writes what
  /// it takes: its pieces lie one behind the other, and no output lies over one that another rank reads. Else nothing.
  [[nodiscard]] InBytes lendable(std::size_t rank) const;
};

/// Returns the size of the elements of which an exchange copies tensors of this dtype.
inline std::size_t item_of_exchange(DType dtype) { return std::min<std::size_t>(size_of(dtype), 8); }

/// The error of an operation whose pieces do not fit into one chunk of `slot` bytes, and overlap.
Status overlapping(const Fingerprint& called, std::size_t slot);

/// Returns the bytes of a half that are for one rank's piece.
inline std::size_t slot_bytes(std::size_t half, std::size_t ranks) { return half / ranks / alignment * alignment; }

}  // namespace tensorferry::collectives::cuda
