/// The page-locked slots through which the GPUs of this process copy chunks that travel as bulk data.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/function.h"
#include "base/mutex.h"
#include "channels/cuda/pinned.h"
#include "channels/cuda_basic/transfer.h"

namespace tensorferry::cuda_basic {

/// Lends slots of `most_chunk_bytes` to all links of the process. Makes them when they are first needed, four at a
/// time, up to `most`, and gives all of them back when none has been lent for `idle`. No peer maps them, so they serve
/// one link after another. They have this bound of their own, so that a buffer can always travel. Thread-safe; runs
/// callbacks with no lock held.
class Slots final {
 public:
  static constexpr std::size_t most = 32, made_at_once = 4;
  static constexpr std::chrono::seconds idle{10};

  /// Returns the process's only pool. Never destroyed.
  static Slots& of_this_process();

  /// Lends a slot. If none is free, returns null and runs `then` once later, on any thread: the caller asks again.
  /// ResourceExhausted: no slot can be made for `device`, and none is lent that could come back.
  Result<std::byte*> lend(int device, UniqueFunction<void()> then);
  void give_back(std::byte* slot);

 private:
  void make(int device);
  void drop_if_idle();
  void wake(std::size_t count);

  Mutex mutex_;
  std::vector<cuda::Pinned> memory_;
  std::vector<std::byte*> free_;
  std::size_t lent_ = 0;
  bool making_ = false, timed_ = false;
  Status failed_;  // why the last try to make slots failed; Ok once one has succeeded
  std::chrono::steady_clock::time_point used_;
  std::vector<UniqueFunction<void()>> waiting_;
};

}  // namespace tensorferry::cuda_basic
