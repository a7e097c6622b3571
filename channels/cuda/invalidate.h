/// Notifications from allocators that device memory is about to be released.
#pragma once

#include <cstddef>

namespace tensorferry {

/// Invalidates `bytes` bytes of device memory at `base`, which an allocator gives back to the driver or unmaps.
///
/// Peers that have mapped the memory unmap it, and network cards give it up, within a second; until then the driver
/// does not get it back. Later memory at the same address is another allocation (Allocations). Allocators of device
/// memory call this; for torch's caching allocator its trace tracker does (converters/cuda.cpp). Never blocks, and may
/// be called under the allocator's lock.
void invalidate_cuda_memory(const void* base, std::size_t bytes) noexcept;

/// Says that no allocator of this process reports the memory that it frees by invalidate_cuda_memory(). Channels then
/// keep no handle of memory for longer than one transfer. For an allocator that has no trace tracker.
void leave_cuda_memory_untracked() noexcept;
/// Returns whether leave_cuda_memory_untracked() was called.
[[nodiscard]] bool cuda_memory_is_untracked() noexcept;

}  // namespace tensorferry
