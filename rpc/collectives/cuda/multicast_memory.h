/// Memory of each rank's GPU that the ranks have bound to one multicast object, so that a switch can reduce and write
/// it.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <string>

#include "base/status.h"
#include "rpc/collectives/raw_group.h"

namespace tensorferry::collectives::cuda {

/// One rank's part: two halves of its own, at an ordinary address, and those of all ranks, at a multicast address
/// (multicast_kernels.h).
///
/// The ranks find out together whether they have it. Rank 0 makes the object, and sends its descriptor to the others.
/// Each rank adds its GPU; when all have, each binds and maps its memory. The ranks meet after each of these steps, so
/// all keep what they have made, or none does. No call of the driver waits for another rank: what the driver would wait
/// for has been done before.
///
/// When the last owner drops this, the background thread unbinds and frees the memory; by then all ranks must be done
/// with this rank's part. What a refusal leaves over is freed before make() returns, while no kernel waits.
class MulticastMemory final {
 public:
  static constexpr std::size_t half_bytes = std::size_t{16} << 20;

  struct Made {
    std::shared_ptr<MulticastMemory> memory;  // null if the ranks have no multicast
    std::string why_not;                      // then says why, and which rank does
  };
  /// Every rank calls this within an operation, for its GPU `device`; each has a GPU of its own. `called` is the same
  /// at all ranks. Takes milliseconds, and 0.5 s while a kernel is compiled. Errors are those of
  /// RawGroup::tell_each_other(): what the driver refuses is no error.
  static Result<Made> make(RawGroup& group, const Fingerprint& called, int device, const WaitLimits& limits);

  ~MulticastMemory();
  MulticastMemory(const MulticastMemory&) = delete;
  MulticastMemory& operator=(const MulticastMemory&) = delete;

  [[nodiscard]] void* own() const { return reinterpret_cast<void*>(own_); }  // NOLINT(performance-no-int-to-ptr)
  [[nodiscard]] void* all() const { return reinterpret_cast<void*>(all_); }  // NOLINT(performance-no-int-to-ptr)

 private:
  explicit MulticastMemory(int device) : device_(device) {}

  // The steps; each returns why it failed, or an empty text. Call inside DeviceGuard.
  std::string create(std::size_t ranks, int& descriptor);
  std::string import(int descriptor);
  std::string add_device();
  std::string bind();
  CUresult map(CUdeviceptr& at, CUmemGenericAllocationHandle handle) const;

  const int device_;
  std::size_t bytes_ = 0;
  std::size_t granularity_ = 0;
  // 0: not made.
  CUmemGenericAllocationHandle object_ = 0, memory_ = 0;
  bool bound_ = false;
  CUdeviceptr own_ = 0, all_ = 0;  // mapped
};

}  // namespace tensorferry::collectives::cuda
