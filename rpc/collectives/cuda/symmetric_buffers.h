/// The working buffers of a group's ranks on their GPUs. Every rank has one of the same size, and maps those of the
/// others.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "channels/cuda/peer_memory.h"
#include "rpc/collectives/cuda/flag_arguments.h"

namespace tensorferry::collectives::cuda {

/// One rank's view of the buffers. Each has two halves, which operations use in turn: a rank may write a half again
/// when all ranks have met once since they read it. Behind them are two smaller halves for the kernels that meet by
/// flags, their flags, their epochs, and a count of blocks (flag_kernels.h).
///
/// When the last owner drops this, the background thread unmaps and frees the memory; by then all ranks must be done
/// with this rank's buffer. Functions take milliseconds, and wait for the device. Not thread-safe.
class SymmetricBuffers final {
 public:
  static constexpr std::size_t half_bytes = std::size_t{64} << 20;
  static constexpr std::size_t flag_half_bytes = std::size_t{16} << 20;

  /// Allocates this rank's buffer. ResourceExhausted: the GPU has no memory left.
  static Result<std::shared_ptr<SymmetricBuffers>> allocate(int device, std::size_t rank, std::size_t ranks);
  ~SymmetricBuffers();
  SymmetricBuffers(const SymmetricBuffers&) = delete;
  SymmetricBuffers& operator=(const SymmetricBuffers&) = delete;

  /// Returns how other ranks find this one's buffer. ChannelUnavailable: the driver does not export it.
  [[nodiscard]] Result<tensorferry::cuda::BufferOffer> offer() const;
  /// Maps the buffer of `rank`, and reads its nonce through the device. ChannelUnavailable says why that fails.
  Status open(std::size_t rank, const tensorferry::cuda::BufferOffer& theirs);

  /// Returns a half of the buffer of `rank`, which is open; `which` is 0 or 1.
  [[nodiscard]] std::byte* half(std::size_t rank, std::size_t which) const {
    return reinterpret_cast<std::byte*>(addresses_[rank]) + which * half_bytes;  // NOLINT(performance-no-int-to-ptr)
  }

  /// Returns the halves, flags, epochs and count of blocks of the buffer of `rank`, which is open, for kernels that
  /// meet by flags.
  [[nodiscard]] void* flag_halves(std::size_t rank) const { return half(rank, 2); }
  [[nodiscard]] unsigned* flags(std::size_t rank) const {
    return reinterpret_cast<unsigned*>(half(rank, 2) + 2 * flag_half_bytes);
  }
  [[nodiscard]] unsigned* epochs(std::size_t rank) const { return flags(rank) + flag_words; }
  [[nodiscard]] unsigned* blocks_ended(std::size_t rank) const { return epochs(rank) + most_flag_blocks; }

 private:
  static constexpr std::size_t words_bytes = (flag_words + most_flag_blocks + 1) * sizeof(unsigned);
  static constexpr std::size_t all_bytes = 2 * half_bytes + 2 * flag_half_bytes + words_bytes;
  SymmetricBuffers(int device, std::size_t rank, std::size_t ranks)
      : device_(device), rank_(rank), addresses_(ranks), others_(ranks) {}
  const int device_;
  const std::size_t rank_;
  std::uint64_t nonce_ = 0;
  std::vector<CUdeviceptr> addresses_;  // by rank; 0: not open
  std::vector<std::shared_ptr<tensorferry::cuda::PeerMemory>> others_;
};

}  // namespace tensorferry::collectives::cuda
