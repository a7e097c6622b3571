/// The registrations of this process, and every access to registered memory.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>

#include "tests/emulated_verbs/gpu.h"

namespace tensorferry::emulated_verbs {

/// One registration. Its rkey differs from its lkey, so that a card rejects one used as the other; it is 0 without
/// rights for peers.
struct Region final : ibv_mr {
  std::uint64_t start = 0;  // the address that work requests name for the first byte
  std::byte* data = nullptr;
  unsigned rights = 0;
  Gpu::Allocation gpu;  // if it is memory of a GPU
};

/// Threads: any. A copy holds a shared lock, so that no memory is touched once `remove` or `revoke` has returned.
class Memory {
 public:
  /// Registers memory. Returns null with errno set like a kernel: EINVAL, EFAULT (not mapped, or not writable), ENOMEM.
  Region* add(ibv_pd* domain, void* data, std::size_t bytes, std::uint64_t start, unsigned rights);
  /// The same for a GPU's memory, exported as a dma-buf. `start` must be the memory's address in this process, because
  /// the emulation copies by the CUDA driver.
  Region* add_dma_buf(ibv_pd* domain, int fd, std::size_t bytes, std::uint64_t start, unsigned rights);
  void remove(Region* region);
  bool revoke(std::uint32_t key);
  void limit(std::uint64_t bytes) { limit_ = bytes; }
  [[nodiscard]] std::uint64_t bytes() const;
  [[nodiscard]] bool used(const ibv_pd* domain) const;

  /// A piece of registered memory, as a work request or a peer names it.
  struct Span {
    const ibv_pd* domain;
    std::uint32_t key;
    std::uint64_t start;
    std::uint64_t bytes;
  };
  /// Returns whether the key is valid, belongs to the domain, covers the span, and grants `rights`. A span of no bytes
  /// is always allowed.
  [[nodiscard]] bool allows(const Span& span, unsigned rights) const;
  /// Copies out of or into the span. Returns false, and may have copied a part, if it is not allowed or not mapped.
  bool read(const Span& span, unsigned rights, std::byte* to) const;
  bool write(const Span& span, unsigned rights, const std::byte* from) const;

 private:
  Region* insert(std::unique_ptr<Region> region, ibv_pd* domain, std::size_t bytes);
  [[nodiscard]] const Region* find(const Span& span, unsigned rights) const;

  mutable std::shared_mutex mutex_;
  std::map<std::uint32_t, Region*> regions_;  // by lkey, and by rkey
  std::map<Region*, std::unique_ptr<Region>> all_;
  std::uint64_t bytes_ = 0;
  std::atomic<std::uint64_t> limit_{~std::uint64_t{0}};
  std::uint32_t last_key_ = 0x1000;
};

}  // namespace tensorferry::emulated_verbs
