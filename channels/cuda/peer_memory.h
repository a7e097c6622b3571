/// Memory of a GPU that another process has allocated and this one has mapped.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "channels/cma/process.h"

namespace tensorferry::cuda {

/// How another process finds an allocation. Plain bytes: the ranks of a group tell them in a step of the group, the
/// owner of a region in its grant.
struct BufferOffer {
  CUipcMemHandle handle{};
  std::uint64_t address = 0;  // in the process that has it
  std::uint64_t nonce = 0;    // the first 8 bytes of a group's buffer; of a caller's allocation, its size
  cma::Identity process;
  std::int32_t device = 0;  // the index in that process
};

/// Returns the offer of the allocation at `address`, of `device`, without a nonce. ChannelUnavailable: the driver does
/// not export it. Call inside DeviceGuard(device).
Result<BufferOffer> offer_of(CUdeviceptr address, int device);

/// When the last owner drops this, the background thread unmaps the memory; by then this process must be done with it.
class PeerMemory final {
 public:
  /// Maps the memory for kernels and copies of `device`; memory of this process needs no mapping. Takes milliseconds.
  /// ChannelUnavailable says why that fails, also if the driver knows no allocation of at least `bytes` bytes there:
  /// the other process's word is not enough. Call inside DeviceGuard(device).
  static Result<std::shared_ptr<PeerMemory>> open(const BufferOffer& theirs, int device, std::uint64_t bytes);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  [[nodiscard]] CUdeviceptr address() const { return address_; }

 private:
  PeerMemory(CUdeviceptr address, int device, bool mapped) : address_(address), device_(device), mapped_(mapped) {}
  const CUdeviceptr address_;
  const int device_;
  const bool mapped_;  // by a handle
};

}  // namespace tensorferry::cuda
