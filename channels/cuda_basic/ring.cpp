#include "channels/cuda_basic/ring.h"

#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "channels/cuda/bench.h"

namespace tensorferry::cuda_basic {
namespace {

double speed_of_gpu(Direction direction, CUdeviceptr slot, int device) {
  const cuda::OnDevice here(device);
  if (!here.status().ok()) return 0;
  cuda::Bench bench;
  const auto memory = bench.allocate(Ring::slot_bytes);
  if (direction == Direction::in) return bench.speed(memory, slot, Ring::slot_bytes);
  bench.copy(memory, slot, Ring::slot_bytes);  // the peer shall find nothing of ours in the ring
  return bench.speed(slot, memory, Ring::slot_bytes);
}

double speed_of_host(Direction direction, std::byte* slot) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::byte> memory(Ring::slot_bytes);
  const bool out = direction == Direction::out;
  Clock::duration taken{};
  for (int i = 0; i < 2; ++i) {  // the first brings the pages
    const auto begun = Clock::now();
    std::memcpy(out ? slot : memory.data(), out ? memory.data() : slot, memory.size());
    taken = Clock::now() - begun;
  }
  return cuda::gigabytes_per_second(memory.size(), std::chrono::duration<double, std::milli>(taken).count());
}

}  // namespace

Result<std::shared_ptr<Ring>> Ring::over(Result<SharedMemory> memory, Device device) {
  if (!memory.ok()) return memory.status();
  if (device.type == DeviceType::cpu) return std::make_shared<Ring>(Ring{cuda::Pinned::unlocked(std::move(*memory))});
  auto pinned = cuda::Pinned::lock(std::move(*memory), device.index);
  if (!pinned.ok()) return pinned.status();
  return std::make_shared<Ring>(Ring{std::move(*pinned)});
}

double Ring::speed(Direction direction, Device device) const {
  return device.type == DeviceType::cuda ? speed_of_gpu(direction, on_device(0), device.index)
                                         : speed_of_host(direction, data(0));
}

}  // namespace tensorferry::cuda_basic
