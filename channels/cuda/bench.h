/// How fast a device copies, found out by having it copy.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "channels/cuda/device.h"

namespace tensorferry::cuda {

/// The time that a stream takes over what it is given between two points. All inside OnDevice of its device.
class Stopwatch final {
 public:
  /// Starts when `stream` has come so far.
  explicit Stopwatch(CUstream stream);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  void stop(CUstream stream);
  /// Once the stream has come past the second point. Not positive: the driver gave no time.
  [[nodiscard]] double milliseconds() const;

 private:
  void mark(std::size_t which, CUstream stream);
  std::array<CUevent, 2> events_{};
};

/// A stream to copy by, for who waits: the background thread alone. Inside OnDevice. After an error nothing more is
/// done. (It has no memory of its own: cuMemAlloc and cuMemFree wait for all that the device is doing, and have other
/// threads that call the driver wait with them.)
class Bench final {
 public:
  Bench();
  ~Bench();
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes);
  /// GB/s of a copy that is made for the second time.
  double speed(CUdeviceptr to, CUdeviceptr from, std::size_t bytes);
  /// Waits for all copies. `what` was tried.
  Status wait(const char* what);

 private:
  void then(CUresult result) {
    if (result_ == CUDA_SUCCESS) result_ = result;
  }
  CUresult result_ = CUDA_SUCCESS;
  CUstream stream_ = nullptr;
};

/// 0: there is no figure.
double gigabytes_per_second(std::size_t bytes, double milliseconds);
/// "NVLink, 342 GB/s", or the link alone where `speed`, in GB/s, is 0.
std::string described(std::string_view link, double speed);

}  // namespace tensorferry::cuda
