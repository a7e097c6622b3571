/// Notifications from allocators that device memory is about to be released.
#pragma once

#include <cstddef>

#include "base/function.h"

namespace tensorferry {

/// Invalidates `bytes` bytes of device memory at `base`, which an allocator gives back to the driver or unmaps.
///
/// Peers that have mapped the memory unmap it within a second; until then the driver does not get it back. Later memory
/// at the same address is exported anew. Allocators of device memory call this; for torch's caching allocator its trace
/// tracker does (converters/cuda.cpp). Never blocks, and may be called under the allocator's lock.
void invalidate_cuda_memory(const void* base, std::size_t bytes) noexcept;

/// Says that no allocator of this process reports the memory that it frees by invalidate_cuda_memory(). Channels then
/// keep no handle of memory for longer than one transfer. For an allocator that has no trace tracker.
void leave_cuda_memory_untracked() noexcept;
/// Returns whether leave_cuda_memory_untracked() was called.
[[nodiscard]] bool cuda_memory_is_untracked() noexcept;

namespace cuda {

/// Registers a listener for invalidated memory until it is destroyed. The listener runs on the event poller's thread
/// and must not block. The destructor waits for a listener's call that is running; never destroy this inside a
/// listener.
class InvalidationListener final {
 public:
  using Listener = UniqueFunction<void(const std::byte* base, std::size_t bytes)>;
  explicit InvalidationListener(Listener listener);
  ~InvalidationListener();
  InvalidationListener(const InvalidationListener&) = delete;
  InvalidationListener& operator=(const InvalidationListener&) = delete;

 private:
  std::size_t number_;
};

}  // namespace cuda
}  // namespace tensorferry
