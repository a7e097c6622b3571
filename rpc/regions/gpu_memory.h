/// Regions in the memory of GPUs: how an owner exports one, how a reader maps it, and how the owner's agent copies for
/// readers that cannot map it. A build without CUDA has gpu_memory_absent.cpp, in which everything is refused.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/record.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "channels/cma/process.h"

namespace tensorferry::regions {

/// Where a region lies on a GPU, for processes of its host. Travels in a grant.
struct GpuPlace {
  std::string handle;         // the driver's, of the allocation; empty: the driver exports none
  std::uint64_t address = 0;  // of the allocation in the owner's process
  std::uint64_t bytes = 0;    // of the allocation
  std::uint64_t offset = 0;   // of the region in it
  std::int32_t index = 0;     // of the GPU in the owner's process; told without a handle too
  cma::Identity process{};    // the owner's
  static constexpr std::tuple fields{at_most(&GpuPlace::handle, 64),
                                     &GpuPlace::address,
                                     &GpuPlace::bytes,
                                     &GpuPlace::offset,
                                     &GpuPlace::index,
                                     &GpuPlace::process};
};

/// Returns Ok if the memory may be a region: the host's, or memory of a GPU that the driver knows. Else
/// InvalidArgument.
Status check_memory(const Buffer& memory);
/// Returns the place of `memory`, which is on a GPU. Without a handle if its allocator's memory has none, such as
/// torch's expandable segments.
GpuPlace place_of(const Buffer& memory);
/// Returns the first GPU that this process has used.
std::optional<std::uint8_t> gpu_in_use();
/// Maps a region of `bytes` bytes for kernels and copies of this process's GPU `device`. The buffer's owner keeps it
/// mapped. Takes milliseconds. ChannelUnavailable says why it fails.
Result<Buffer> map_gpu_memory(const GpuPlace& place, std::uint64_t bytes, int device);
/// Memory of the host that is page-locked, so that kernels and copies of this process's GPUs read it in the order of
/// their streams. The destructor unlocks it.
class LockedWords {
 public:
  virtual ~LockedWords() = default;
  /// Returns the address of its first byte for the GPU `device`.
  virtual Result<std::byte*> address_on(int device) = 0;
};
/// Locks the memory by way of the GPU `device`, and keeps its owner. Uses no other GPU, on which it would make a
/// context. It must not be locked already. Errors are those of the driver.
Result<std::shared_ptr<LockedWords>> lock_words(const Buffer& page, int device);
/// Copies runs of `gpu` to `host`, one after another, or back if `to_gpu`; returns when the bytes are there. Not
/// ordered behind the work of any stream. The errors of the driver.
Status copy_runs(const Buffer& gpu, std::uint64_t run_bytes, const std::vector<std::uint64_t>& offsets, std::byte* host,
                 bool to_gpu);
/// Bytes of a GPU's memory, and where the host wants them.
struct HostCopy {
  std::uint64_t offset = 0;
  std::byte* host = nullptr;
  std::uint64_t bytes = 0;
};
/// Copies as copy_runs() does, each its own number of bytes.
Status copy_to_host(const Buffer& gpu, const std::vector<HostCopy>& copies);

}  // namespace tensorferry::regions
