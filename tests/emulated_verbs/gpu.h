/// Copies to and from GPU memory by the CUDA driver that this process has loaded, be it a GPU's or tests/emulated_gpu.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tensorferry::emulated_verbs {

class Gpu {
 public:
  /// An allocation of a GPU, or none. Each allocation of CUDA has a number of its own, so memory that was freed and
  /// allocated again at its address is another one: a card that still writes there would damage it.
  class Allocation {
   public:
    explicit operator bool() const { return device_ >= 0; }
    /// Copies. False if the memory at the address is another allocation by now, or if the driver refuses.
    bool read(std::byte* to, const std::byte* from, std::size_t bytes) const;
    bool write(std::byte* to, const std::byte* from, std::size_t bytes) const;

   private:
    friend class Gpu;
    [[nodiscard]] bool is_current(const std::byte* data, std::size_t bytes) const;
    int device_ = -1;
    std::uint64_t first_page_ = 0;
    std::vector<std::uint64_t> numbers_;  // by page: a range of addresses may be mapped in several pieces
  };

  /// Returns the allocation that holds the bytes; none if they are not a GPU's.
  static Allocation find(const void* data, std::size_t bytes);
  /// Returns whether ibv_reg_mr takes GPU memory, as with the module nvidia-peermem: unless EMULATED_VERBS_PEERMEM=0.
  static bool peer_memory();
  /// Returns whether dma-bufs are taken: unless EMULATED_VERBS_DMABUF=0.
  static bool dma_buf();
};

}  // namespace tensorferry::emulated_verbs
