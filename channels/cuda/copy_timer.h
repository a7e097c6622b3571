/// Measures how fast a device copies.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "channels/cuda/device.h"

namespace tensorferry::cuda {

/// Measures the time between two points of a stream, by timing events. Use all of it inside DeviceGuard of the stream's
/// device, the destructor included.
class Stopwatch final {
 public:
  /// Records the first point on `stream`.
  explicit Stopwatch(CUstream stream);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  /// Records the second point.
  void stop(CUstream stream);
  /// Returns the time between the points. Call when the stream has passed the second one. Not positive: the driver gave
  /// no time.
  [[nodiscard]] double milliseconds() const;

 private:
  void mark(std::size_t which, CUstream stream);
  std::array<CUevent, 2> events_{};
};

/// Copies on a stream of its own and times the copies. It blocks, so only the background thread uses it. Use it inside
/// DeviceGuard. After an error it does nothing more, and wait() returns that error.
///
/// It allocates no memory: cuMemAlloc and cuMemFree wait for all work of the device, and block other threads that call
/// the driver meanwhile.
class CopyTimer final {
 public:
  CopyTimer();
  ~CopyTimer();
  CopyTimer(const CopyTimer&) = delete;
  CopyTimer& operator=(const CopyTimer&) = delete;

  /// Enqueues a copy.
  void copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes);
  /// Copies twice, waits, and returns the GB/s of the second copy; 0 on an error.
  double speed(CUdeviceptr to, CUdeviceptr from, std::size_t bytes);
  /// Waits for all copies. `what` names the operation in an error's text.
  Status wait(const char* what);

 private:
  /// Keeps the first error.
  void then(CUresult result) {
    if (result_ == CUDA_SUCCESS) result_ = result;
  }
  CUresult result_ = CUDA_SUCCESS;
  CUstream stream_ = nullptr;
};

/// Returns GB/s (10^9 bytes); 0 if `milliseconds` is not positive.
double gigabytes_per_second(std::size_t bytes, double milliseconds);
/// Returns "NVLink, 342 GB/s", or the link alone if `speed`, in GB/s, is not positive.
std::string described(std::string_view link, double speed);

}  // namespace tensorferry::cuda
