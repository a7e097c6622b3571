#include "converters/cuda.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "channels/cuda/invalidate.h"
#include "converters/kept.h"

namespace tensorferry {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using c10::cuda::CUDAGuard;
using c10::cuda::CUDAStream;

c10::DeviceIndex index_of(Device device) { return static_cast<c10::DeviceIndex>(device.index); }

cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

/// Returns whether all work of a stream is done. CUDA forbids the query on a stream that is being captured; the callers
/// pass streams of Gpu, which are never captured, or streams of received buffers.
bool is_idle(cudaStream_t stream) {
  const auto state = cudaStreamQuery(stream);
  if (state == cudaSuccess) return true;
  if (state != cudaErrorNotReady) C10_CUDA_CHECK(state);
  (void)cudaGetLastError();  // clears the error, which torch would report for its next call
  return false;
}

/// The streams and events with which this process receives on one GPU. It does not use streams of torch's pool, because
/// the program may compute, or capture a graph, on any of them. Thread-safe.
class Gpu {
 public:
  explicit Gpu(c10::DeviceIndex index) : index_(index) {
    const CUDAGuard guard(index);
    cudaDeviceProp properties;
    C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
    memory_ = properties.totalGlobalMem;
  }

  /// Returns the GPU's total memory, in bytes.
  [[nodiscard]] std::size_t memory() const { return memory_; }

  /// Lends a stream to receive on until give_back(), and returns its number. Prefers the first stream that is neither
  /// lent nor busy: torch's allocator keeps a freed block for the stream that it was allocated for, so fewer streams
  /// reuse more blocks. A query takes about a microsecond, so after four busy streams, or if all are lent, it lends one
  /// of all streams in turn.
  std::size_t lend_stream() {
    const std::lock_guard lock(mutex_);
    auto number = streams_.size();
    for (std::size_t i = 0, asked = 0; i < streams_.size() && asked < 4; ++i) {
      if (streams_[i].lent > 0) continue;
      ++asked;
      if (streams_[i].stream != nullptr && !is_idle(streams_[i].stream)) continue;
      number = i;
      break;
    }
    if (number == streams_.size()) number = next_++ % streams_.size();
    auto& place = streams_[number];
    if (place.stream == nullptr) place.stream = new_stream();
    ++place.lent;
    return number;
  }
  void give_back(std::size_t number) {
    const std::lock_guard lock(mutex_);
    --streams_[number].lent;
  }
  [[nodiscard]] cudaStream_t stream(std::size_t number) const { return streams_[number].stream; }

  /// Makes `later` wait for all work that `earlier` has been given so far.
  void order(cudaStream_t earlier, cudaStream_t later) {
    const CUDAGuard guard(index_);
    if (is_idle(earlier)) return;
    cudaEvent_t event = take_event();
    C10_CUDA_CHECK(cudaEventRecord(event, earlier));
    C10_CUDA_CHECK(cudaStreamWaitEvent(later, event, 0));
    const std::lock_guard lock(mutex_);
    events_.push_back(event);  // an enqueued wait no longer needs the event
  }

 private:
  cudaEvent_t take_event() {
    {
      const std::lock_guard lock(mutex_);
      if (!events_.empty()) {
        auto* const event = events_.back();
        events_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }

  c10::DeviceIndex index_;
  std::size_t memory_ = 0;
  struct LentStream {
    cudaStream_t stream = nullptr;  // made at first use, never destroyed
    int lent = 0;
  };
  std::mutex mutex_;  // guards the members below
  std::array<LentStream, 16> streams_{};
  std::size_t next_ = 0;
  std::vector<cudaEvent_t> events_;
};

/// Invalidates memory that torch's allocator gives back to the driver, so that peers unmap it.
void tell_peers_of_what_goes() {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  if (allocator::get()->name() == "cudaMallocAsync") return;  // it has no trackers, and peers never map its memory
  try {
    allocator::attachAllocatorTraceTracker([](const Entry& entry) {
      if (entry.action_ != Entry::SEGMENT_FREE && entry.action_ != Entry::SEGMENT_UNMAP) return;
      invalidate_cuda_memory(reinterpret_cast<const void*>(entry.addr_), entry.size_);
    });
  } catch (const c10::Error&) {  // an allocator of the program's own (CUDAPluggableAllocator): it has no trace
    leave_cuda_memory_untracked();
  }
}

/// The GPUs of this process. Like torch's allocator and streams they are never destroyed; all agents share them.
class Gpus {
 public:
  static Gpus& of_this_process() {
    static auto& gpus = *new Gpus;
    return gpus;
  }

  /// Returns null if there is no such GPU.
  Gpu* find(Device device) {
    if (device.type != DeviceType::cuda || device.index >= gpus_.size()) return nullptr;
    const std::lock_guard lock(mutex_);
    auto& gpu = gpus_[device.index];
    if (gpu == nullptr) gpu = new Gpu(index_of(device));
    return gpu;
  }

 private:
  Gpus() {
    at::globalContext().lazyInitDevice(at::kCUDA);
    tell_peers_of_what_goes();
    gpus_.resize(static_cast<std::size_t>(c10::cuda::device_count()));
  }

  std::mutex mutex_;
  std::vector<Gpu*> gpus_;
};

/// Returns InvalidArgument if a CUDA graph is being captured on `stream`: enqueued work would become a part of the
/// graph instead of running. `what` is the verb of the error's text.
Status check_not_capturing(const CUDAStream& stream, const char* what) {
  cudaStreamCaptureStatus capture{};
  const auto asked = cudaStreamIsCapturing(stream.stream(), &capture);
  if (asked == cudaSuccess && capture == cudaStreamCaptureStatusNone) return {};
  if (asked != cudaSuccess) (void)cudaGetLastError();
  if (asked != cudaSuccess && asked != cudaErrorStreamCaptureImplicit) C10_CUDA_CHECK(asked);
  const auto device = "cuda:" + std::to_string(static_cast<int>(stream.device_index()));
  return {Code::invalid_argument, std::string("cannot ") + what + " a tensor on " + device +
                                      " now: a CUDA graph is being captured on its current stream, and calls are not "
                                      "part of a graph. Make the call before or after the capture"};
}

/// The owner of a received buffer: its memory until to_storage() takes it, and the lent stream. The memory was
/// allocated for that stream, so the allocator reuses it in the stream's order.
struct Landed {
  explicit Landed(Gpu& of) : gpu(of), number(of.lend_stream()) {}
  ~Landed() { gpu.give_back(number); }
  Landed(const Landed&) = delete;
  Landed& operator=(const Landed&) = delete;

  Gpu& gpu;
  const std::size_t number;
  at::DataPtr data;
};
/// The deleter of Landed owners. Its type marks an Owner as a Landed.
struct DropLanded {
  void operator()(void* landed) const { delete static_cast<Landed*>(landed); }
};

Landed* landed_in(const Owner& owner) {
  return std::get_deleter<DropLanded>(owner) != nullptr ? static_cast<Landed*>(owner.get()) : nullptr;
}

/// Sets this thread's capture mode to relaxed for a scope, because another thread may be capturing a graph. The calls
/// in the scope do not touch that capture.
struct TorchCaptureModeGuard {
  c10::cuda::CUDAStreamCaptureModeGuard mode{cudaStreamCaptureModeRelaxed};
};

class CudaMemory final : public Memory {
 public:
  Buffer allocate(std::size_t bytes, Device device) override {
    Buffer buffer{device, nullptr, bytes, nullptr, nullptr};
    try {
      auto* const gpu = Gpus::of_this_process().find(device);
      if (gpu == nullptr || bytes > gpu->memory()) return buffer;
      const TorchCaptureModeGuard outside;
      const CUDAGuard guard(index_of(device));
      auto* const landed = new Landed(*gpu);
      buffer.owner = Owner(landed, DropLanded());
      auto* const stream = gpu->stream(landed->number);
      buffer.stream = stream;
      if (bytes == 0) return buffer;
      landed->data = memory_for(stream, bytes, device);
      buffer.data = static_cast<std::byte*>(landed->data.get());
    } catch (const c10::Error& error) {  // out of memory, or no working GPU
      TORCH_WARN_ONCE("tensorferry: no memory on ", text_of(device),
                      " for a received tensor: ", error.what_without_backtrace());
      return Buffer{device, nullptr, bytes, nullptr, nullptr};
    }
    return buffer;
  }

 private:
  static at::DataPtr memory_for(cudaStream_t stream, std::size_t bytes, Device device) {
    // With this variable, which memory checkers need, torch caches nothing: each block is fresh, for any stream.
    static const bool uncached = std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr;
    if (uncached) return allocator::get()->allocate(bytes);
    auto* const data = allocator::raw_alloc_with_stream(bytes, stream);
    // The allocator recognises its own memory by this deleter.
    return {data, data, allocator::get()->raw_deleter(), at::Device(at::kCUDA, index_of(device))};
  }
};

class CudaConverter final : public Converter {
 public:
  explicit CudaConverter(bool (*leaves_storages)()) : leaves_storages_(leaves_storages) {}

  Result<Buffer> to_buffer(const c10::Storage& storage, std::size_t offset, std::size_t bytes) override {
    const auto device = Device{DeviceType::cuda, static_cast<std::uint8_t>(storage.device().index())};
    try {
      (void)Gpus::of_this_process();
      const auto stream = c10::cuda::getCurrentCUDAStream(storage.device().index());
      if (auto status = check_not_capturing(stream, "send"); !status.ok()) return status;
      auto* data = const_cast<std::byte*>(static_cast<const std::byte*>(storage.data()));
      if (data != nullptr) data += offset;
      return Buffer{device, data, bytes, stream.stream(), std::make_shared<KeptStorage>(storage, leaves_storages_)};
    } catch (const c10::Error& error) {
      return Status(Code::internal,
                    "cannot send a tensor on " + text_of(device) + ": " + std::string(error.what_without_backtrace()));
    }
  }

  Result<c10::Storage> to_storage(Buffer buffer) override {
    try {
      return received(std::move(buffer));
    } catch (const c10::Error& error) {
      return Status(Code::internal, std::string("cannot receive a tensor: ") + error.what_without_backtrace());
    }
  }

  [[nodiscard]] std::optional<c10::Stream> stream_of(const Buffer& buffer) const override {
    return c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(buffer.stream), index_of(buffer.device)).unwrap();
  }

  [[nodiscard]] std::shared_ptr<Memory> memory() const override { return memory_; }

 private:
  static c10::Storage storage_of(std::size_t bytes, at::DataPtr data) {
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                                 allocator::get(), /*resizable=*/true);
  }

  static Result<c10::Storage> received(Buffer buffer) {
    auto* const gpu = Gpus::of_this_process().find(buffer.device);
    if (gpu == nullptr) return Status(Code::invalid_argument, "this process has no " + text_of(buffer.device));
    const at::Device device(at::kCUDA, index_of(buffer.device));
    if (buffer.bytes == 0) return storage_of(0, at::DataPtr(nullptr, device));
    const auto current = c10::cuda::getCurrentCUDAStream(device.index());
    if (auto status = check_not_capturing(current, "receive"); !status.ok()) return status;
    auto* const bytes_on = static_cast<cudaStream_t>(buffer.stream);
    {
      const TorchCaptureModeGuard outside;
      if (bytes_on != current.stream()) gpu->order(bytes_on, current.stream());
    }
    auto* const landed = landed_in(buffer.owner);
    if (landed == nullptr) {  // the caller's own memory (out=), which it keeps itself
      auto* const data = buffer.data;
      return storage_of(buffer.bytes, at::DataPtr(data, new Owner(std::move(buffer.owner)), &drop_owner, device));
    }
    if (!landed->data) return Status(Code::internal, "a received buffer was turned into a tensor twice");
    if (bytes_on != current.stream()) allocator::recordStream(landed->data, current);
    return storage_of(buffer.bytes, std::exchange(landed->data, at::DataPtr()));
  }

  std::shared_ptr<CudaMemory> memory_ = std::make_shared<CudaMemory>();
  bool (*leaves_storages_)();
};

}  // namespace

std::shared_ptr<Converter> make_cuda_converter(bool (*leaves_storages)()) {
  return std::make_shared<CudaConverter>(leaves_storages);
}

void report_released_memory() { (void)Gpus::of_this_process(); }

Status refusal_of_capture(const c10::Stream& stream) {
  if (stream.device_type() != c10::DeviceType::CUDA) return {};
  return check_not_capturing(CUDAStream(stream), "reduce or exchange");
}

bool has_happened(const c10::Event& event) {
  if (event.device_type() != c10::DeviceType::CUDA) return event.query();
  const TorchCaptureModeGuard outside;
  return event.query();
}

int gpu_count() { return static_cast<int>(c10::cuda::device_count()); }

void* native_handle(const c10::Stream& stream) { return CUDAStream(stream).stream(); }

}  // namespace tensorferry
