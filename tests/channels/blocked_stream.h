/// A stream that stands for a long kernel, memory that a caller provides, and the end of background jobs, for the tests
/// of the cuda channels.
#pragma once

#include <gtest/gtest.h>

#include <future>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "channels/channel.h"
#include "channels/cuda/event_poller.h"
#include "channels/cuda/pinned.h"

namespace tensorferry::conformance {

/// A stream of the first GPU that is blocked until let_go(). If it is made with CU_STREAM_DEFAULT, the legacy default
/// stream waits for it. For the main thread alone.
class Blocked {
 public:
  explicit Blocked(unsigned int flags = CU_STREAM_NON_BLOCKING) {
    const cuda::DeviceGuard here(0);
    EXPECT_EQ(cuda::api()->stream_create(&stream_, flags), CUDA_SUCCESS);
    EXPECT_EQ(word().wait_on(stream_, 1), CUDA_SUCCESS);
  }
  ~Blocked() {
    let_go();
    const cuda::DeviceGuard here(0);
    while (cuda::api()->stream_query(stream_) == CUDA_ERROR_NOT_READY) std::this_thread::yield();
    cuda::api()->stream_destroy(stream_);
    kept().push_back(std::move(page_));
  }
  Blocked(const Blocked&) = delete;
  Blocked& operator=(const Blocked&) = delete;

  void let_go() const { word().set(1); }
  [[nodiscard]] CUstream get() const { return stream_; }

 private:
  /// The pages of earlier ones, which stay locked: to unlock one, a background thread would wait for the next Blocked.
  static std::vector<cuda::Pinned>& kept() {
    static auto& pages = *new std::vector<cuda::Pinned>;
    return pages;
  }
  [[nodiscard]] cuda::Word word() const { return cuda::word_at(page_, 0); }

  cuda::Pinned page_ = *cuda::Pinned::lock(*SharedMemory::create(4096), 0);
  CUstream stream_ = nullptr;
};

/// Waits for the jobs that the cuda channels have given their background thread so far; it runs them in their order.
inline void await_background() {
  std::promise<void> so_far;
  cuda::background().submit([&] { so_far.set_value(); });
  so_far.get_future().wait();
}

/// The memory that a caller provides (`out=`).
struct Into final : Sink {
  explicit Into(Buffer b) : buffer(std::move(b)) {}
  std::optional<Buffer> reserve(std::size_t) override { return buffer; }
  bool adopt(Buffer) override { return false; }
  Buffer buffer;
};

}  // namespace tensorferry::conformance
