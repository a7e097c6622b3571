/// Receive memory on the CPU: a pool of mapped pages. A fresh page costs more than the bytes that land in it (cold 4 KB
/// pages receive at 1.5-2 GB/s, warm ones at memory speed).
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "channels/buffer.h"

namespace tensorferry {

/// Pools blocks by size class: four classes per power of two, from 4 KB, so at most 25 % is wasted. Smaller buffers
/// come from malloc. A block returns to its class when its last holder drops it. If the pool itself is gone by then,
/// the block is freed. Each class is last in, first out. Blocks of 2 MB and more are advised to be huge pages.
/// Thread-safe.
///
/// In a forked child the pool is its parent's. A block that the child drops stays as it is, and malloc serves the
/// child's own requests.
class HostMemory final : public Memory {
 public:
  struct Limits {
    std::size_t idle_bytes = std::size_t{1} << 30;    // kept while idle; beyond it a returned block is freed
    std::size_t floor_bytes = std::size_t{64} << 20;  // trim() leaves this much
    std::chrono::seconds idle_for{5};                 // trim() frees blocks that were idle for so long
  };

  HostMemory();
  explicit HostMemory(Limits limits);
  ~HostMemory() override;

  /// Returns `bytes` bytes, 64-byte aligned; from 64 KB on page-aligned, except in a forked child. `data` is null if
  /// the system has no memory left, and for devices other than the CPU. It is never null for 0 bytes on the CPU.
  Buffer allocate(std::size_t bytes, Device device) override;

  /// Frees blocks that were idle for `idle_for`, the longest idle of a class first, while more than `floor_bytes` is
  /// idle. The agent's reactor calls it.
  void trim();

  /// Counts whole blocks of the pool's classes. Memory that malloc serves is not counted.
  struct Usage {
    std::size_t held_bytes = 0;  // by receivers
    std::size_t idle_bytes = 0;  // in the pool
  };
  [[nodiscard]] Usage usage() const;

 private:
  struct Pool;
  std::shared_ptr<Pool> pool_;
};

}  // namespace tensorferry
