/// Told by allocators: device memory is about to go.
#pragma once

#include <cstddef>

#include "channels/function.h"

namespace tensorferry {

/// `bytes` bytes of device memory from `base` on are being given back to the driver, or unmapped: peers that have
/// mapped them let go (within a second, or the memory would not come back), and the address's next memory is new to
/// them. For whoever allocates device memory; torch's caching allocator does by its trace tracker. Never blocks, and
/// may be called under the allocator's lock.
void forget_cuda_memory(const void* base, std::size_t bytes) noexcept;

namespace cuda {

/// Is told of what is forgotten, on a thread of its own, until it is destroyed (which waits for a call under way).
class Forgetting final {
 public:
  using Listener = UniqueFunction<void(const std::byte* base, std::size_t bytes)>;
  explicit Forgetting(Listener listener);
  ~Forgetting();
  Forgetting(const Forgetting&) = delete;
  Forgetting& operator=(const Forgetting&) = delete;

 private:
  std::size_t number_;
};

}  // namespace cuda
}  // namespace tensorferry
