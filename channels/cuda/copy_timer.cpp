#include "channels/cuda/copy_timer.h"

#include <chrono>
#include <thread>

#include "base/text.h"

namespace tensorferry::cuda {

Stopwatch::Stopwatch(CUstream stream) { mark(0, stream); }

Stopwatch::~Stopwatch() {
  for (auto* event : events_) {
    if (event != nullptr) api()->event_destroy(event);
  }
}

void Stopwatch::stop(CUstream stream) { mark(1, stream); }

void Stopwatch::mark(std::size_t which, CUstream stream) {
  auto& event = events_.at(which);
  if (api()->event_create(&event, CU_EVENT_DEFAULT) == CUDA_SUCCESS) api()->event_record(event, stream);
}

double Stopwatch::milliseconds() const {
  const auto [begin, end] = events_;
  float milliseconds = 0;
  if (begin == nullptr || end == nullptr || api()->event_elapsed_time(&milliseconds, begin, end) != CUDA_SUCCESS)
    return 0;
  return static_cast<double>(milliseconds);
}

CopyTimer::CopyTimer() { then(api()->stream_create(&stream_, CU_STREAM_NON_BLOCKING)); }

CopyTimer::~CopyTimer() {
  if (stream_ != nullptr) api()->stream_destroy(stream_);
}

void CopyTimer::copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  if (result_ == CUDA_SUCCESS) then(api()->memcpy_async(to, from, bytes, stream_));
}

double CopyTimer::speed(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  copy(to, from, bytes);
  Stopwatch watch(stream_);
  copy(to, from, bytes);
  watch.stop(stream_);
  return wait("copying").ok() ? gigabytes_per_second(bytes, watch.milliseconds()) : 0;
}

Status CopyTimer::wait(const char* what) {
  while (result_ == CUDA_SUCCESS) {
    const auto asked = api()->stream_query(stream_);
    if (asked == CUDA_SUCCESS) break;
    if (asked != CUDA_ERROR_NOT_READY) then(asked);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return status_of(result_, what);
}

double gigabytes_per_second(std::size_t bytes, double milliseconds) {
  return milliseconds > 0 ? static_cast<double>(bytes) / 1e6 / milliseconds : 0;
}

std::string described(std::string_view link, double speed) {
  if (speed <= 0) return std::string(link);
  return formatted("{}, {} GB/s", link, fixed(speed, speed < 1 ? 2 : 0));
}

}  // namespace tensorferry::cuda
