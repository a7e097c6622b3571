#include "contrib/tensorpipe/gpu.h"

#include <tensorpipe/tensorpipe_cuda.h>

#include <utility>

#include "base/text.h"
#include "channels/cuda/device.h"
#include "channels/cuda/event_poller.h"

namespace tensorferry::tp::gpu {
namespace {

namespace channel = tensorpipe::channel;

/// The priorities that torch.distributed.rpc gives these channels.
constexpr std::int64_t xth_priority = 2, ipc_priority = 1, basic_priority = 0;

/// Owns an offered source: keeps the caller's owner, and the event in the caller's stream after which the bytes are
/// valid.
struct CopySource {
  Owner owner;
  cuda::GpuEvent ready;  // empty: the bytes are valid already
};

/// Returns whether cuda_ipc can export the memory. It uses cudaIpcGetMemHandle, which knows cudaMalloc's memory alone;
/// if that fails, TensorPipe ends the process.
bool exports(const Buffer& buffer) {
  const cuda::DeviceGuard here(buffer.device.index);
  auto attribute = CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
  int capable = 0;
  void* value = &capable;
  const auto result = cuda::api()->pointer_get_attributes(1, &attribute, &value, cuda::address_of(buffer.data));
  return result == CUDA_SUCCESS && capable != 0;
}

}  // namespace

std::string why_missing() { return cuda::api() == nullptr ? cuda::why_missing() : std::string(); }

std::shared_ptr<channel::Context> register_channels(tensorpipe::Context& context) {
  auto any = channel::cuda_basic::create(channel::basic::create());
  context.registerChannel(basic_priority, "cuda_basic", any);
#if TENSORPIPE_HAS_CUDA_IPC_CHANNEL
  context.registerChannel(ipc_priority, "cuda_ipc", channel::cuda_ipc::create());
#endif
  context.registerChannel(xth_priority, "cuda_xth", channel::cuda_xth::create());
  return any;
}

std::variant<Buffer, Refusal> held(const Buffer& buffer) {
  auto ready = cuda::ready_of(buffer);
  if (auto* refusal = std::get_if<Refusal>(&ready)) return std::move(*refusal);
  if (!exports(buffer))
    return Refusal{"TensorPipe carries only memory of cudaMalloc, not of expandable segments or memory pools"};
  auto source = std::make_shared<CopySource>(CopySource{buffer.owner, std::move(std::get<cuda::GpuEvent>(ready))});
  auto held = buffer;
  held.stream = static_cast<Stream>(source->ready.get());
  held.owner = std::move(source);
  return held;
}

Sending::~Sending() {
  if (stream_ == nullptr) return;
  const cuda::DeviceGuard here(device_);
  if (here.status().ok()) cuda::api()->stream_destroy(static_cast<CUstream>(stream_));
}

Result<tensorpipe::Buffer> Sending::buffer_of(const Buffer& held) {
  const cuda::DeviceGuard here(held.device.index);
  if (!here.status().ok()) return here.status();
  const std::lock_guard lock(mutex_);
  auto* stream = static_cast<CUstream>(stream_);
  auto result = CUDA_SUCCESS;
  if (stream == nullptr) result = cuda::api()->stream_create(&stream, CU_STREAM_NON_BLOCKING);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "making a stream");
  stream_ = stream;
  device_ = held.device.index;
  if (held.stream != nullptr) {
    result = cuda::api()->stream_wait_event(stream, static_cast<CUevent>(held.stream), 0);
    if (result != CUDA_SUCCESS) return cuda::status_of(result, "ordering a copy behind its source");
  }
  return tensorpipe::Buffer(tensorpipe::CudaBuffer{held.data, stream});
}

void Sending::when_read(const Buffer& held, Completion then) {
  Stream stream = nullptr;
  {
    const std::lock_guard lock(mutex_);
    stream = stream_;
  }
  const cuda::DeviceGuard here(held.device.index);
  cuda::EventPoller::of_this_process().when_done(cuda::Watch::loosely, held.device.index, stream, std::move(then));
}

tensorpipe::Buffer buffer_of(const Buffer& memory) {
  return tensorpipe::CudaBuffer{memory.data, static_cast<CUstream>(memory.stream)};
}

void when_written(const Buffer& memory, Completion then) {
  const cuda::DeviceGuard here(memory.device.index);
  cuda::EventPoller::of_this_process().when_done(cuda::Watch::loosely, memory.device.index, memory.stream,
                                                 std::move(then));
}

void progress() { cuda::EventPoller::of_this_process().poll_now(); }

}  // namespace tensorferry::tp::gpu
