/// Receive memory on the CPU: a pool of mapped pages, because a fresh page costs more than the bytes that land in it
/// (cold 4 KB pages receive at 1.5-2 GB/s, warm ones at memory speed).
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "channels/buffer.h"

namespace tensorferry {

/// Blocks by size class (four a power of two, so at most 25 % waste; 4 KB and up; smaller ones come from malloc).
/// A block goes back to its class when its last holder lets go, also after the pool itself is gone (then it is freed).
/// Last in, first out. Blocks of 2 MB and more are advised to be huge pages. Thread-safe.
///
/// In a forked child the pool is its parent's: a block that the child lets go of stays as it is, and the child's own
/// requests are served by malloc.
class HostMemory final : public Memory {
 public:
  struct Limits {
    std::size_t idle_bytes = std::size_t{1} << 30;    // kept while idle; beyond it a returned block is unmapped
    std::size_t floor_bytes = std::size_t{64} << 20;  // what trim() leaves
    std::chrono::seconds idle_for{5};                 // blocks unused for so long are trimmed to the floor
  };

  HostMemory();
  explicit HostMemory(Limits limits);
  ~HostMemory() override;

  /// `bytes` bytes, 64-byte aligned; page-aligned from 64 KB. Null data when the system has none left, and for devices
  /// other than the CPU; never for 0 bytes.
  Buffer allocate(std::size_t bytes, Device device) override;

  /// Unmaps blocks that were idle for `idle_for`, the longest idle of a class first, as long as more than the floor is
  /// idle. Called by the agent's housekeeping.
  void trim();

  /// Whole blocks of the pool's classes; what malloc serves is not counted.
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
