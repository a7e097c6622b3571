#include "channels/cuda/pinned.h"

#include <utility>

#include "channels/cuda/watcher.h"

namespace tensorferry::cuda {

Result<Pinned> Pinned::lock(SharedMemory memory, int device) {
  const OnDevice here(device);
  if (!here.status().ok()) return here.status();
  auto result =
      api()->host_register(memory.data(), memory.bytes(), CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  if (result != CUDA_SUCCESS) return status_of(result, "page-locking memory");
  Pinned pinned;
  result = api()->host_get_device_pointer(&pinned.address_, memory.data(), 0);
  pinned.memory_ = std::move(memory);
  pinned.device_ = device;
  if (result != CUDA_SUCCESS) return status_of(result, "finding page-locked memory's address");
  return pinned;
}

Pinned Pinned::unlocked(SharedMemory memory) {
  Pinned pinned;
  pinned.memory_ = std::move(memory);
  return pinned;
}

Pinned& Pinned::operator=(Pinned&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(address_, other.address_);
  std::swap(device_, other.device_);
  return *this;
}

Pinned::~Pinned() {
  if (!memory_ || address_ == 0) return;
  background().submit([memory = std::move(memory_), device = device_] {
    const OnDevice here(device);
    if (here.status().ok()) api()->host_unregister(memory.data());
  });
}

Word word_at(const Pinned& memory, std::size_t offset) {
  return {reinterpret_cast<std::atomic<std::uint32_t>*>(memory.data() + offset), memory.on_device(offset)};
}

}  // namespace tensorferry::cuda
