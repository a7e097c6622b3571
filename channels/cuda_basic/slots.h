/// The page-locked slots through which the GPUs of this process copy chunks that travel as bulk data.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/function.h"
#include "base/mutex.h"
#include "channels/allocations.h"
#include "channels/cuda/pinned.h"
#include "channels/cuda_basic/transfer.h"

namespace tensorferry::cuda_basic {

/// Lends slots of `most_chunk_bytes` to all links of the process: one pool for chunks that are sent, one for those that
/// are received. Network cards keep a pool's memory registered, and peers may read that of the first one. Makes them
/// when they are first needed, four at a time, up to `most`, and gives all of them back when none has been lent for
/// `idle`. No peer maps them, so they serve one link after another. They have this bound of their own, so that a buffer
/// can always travel. Thread-safe; runs callbacks with no lock held.
class Slots final {
 public:
  static constexpr std::size_t most = 16, made_at_once = 4;
  static constexpr std::chrono::seconds idle{10};

  /// Returns the process's pool for a direction. Never destroyed.
  static Slots& of_this_process(Direction direction);

  /// Lends a slot. If none is free, returns null and runs `then` once later, on any thread: the caller asks again.
  /// ResourceExhausted: no slot can be made for `device`, and none is lent that could come back.
  Result<std::byte*> lend(int device, UniqueFunction<void()> then);
  void give_back(std::byte* slot);

 private:
  explicit Slots(Allocations::Kind kind) : kind_(kind) {}

  /// Page-locked memory of several slots. Network cards that carry the chunks keep it registered (Allocations).
  class Slab final {
   public:
    Slab(cuda::Pinned pinned, Allocations::Kind kind);
    ~Slab();
    Slab(Slab&&) noexcept = default;
    Slab& operator=(Slab&&) = delete;
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;
    [[nodiscard]] std::byte* slot(std::size_t index) const { return pinned_.data() + index * most_chunk_bytes; }

   private:
    cuda::Pinned pinned_;
    std::uint64_t generation_;
  };

  void make(int device);
  void drop_if_idle();
  void wake(std::size_t count);

  const Allocations::Kind kind_;
  Mutex mutex_;  // guards the members below
  std::vector<Slab> memory_;
  std::vector<std::byte*> free_;
  std::size_t lent_ = 0;
  bool making_ = false, timed_ = false;
  Status failed_;  // why the last try to make slots failed; Ok once one has succeeded
  std::chrono::steady_clock::time_point used_;
  std::vector<UniqueFunction<void()>> waiting_;
};

}  // namespace tensorferry::cuda_basic
