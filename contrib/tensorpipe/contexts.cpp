#include "contrib/tensorpipe/contexts.h"

#include <exception>
#include <utility>

#include "base/per_process.h"
#include "base/text.h"
#include "base/threads.h"
#include "contrib/tensorpipe/gpu.h"

namespace tensorferry::tp {
namespace {

/// TensorPipe's order of these channels, which is also that of torch.distributed.rpc.
constexpr std::int64_t cma_priority = 1, basic_priority = 0;

}  // namespace

Contexts& Contexts::of_this_process() {
  static auto& contexts = *new PerProcess<Contexts>;
  return contexts.get();
}

Contexts::ContextEntry& Contexts::entry(DeviceType type) {
  auto& entry = entries_[type == DeviceType::cuda ? 1 : 0];
  if (entry.context || !entry.failed.ok()) return entry;
  const ThreadStart here;  // of those that TensorPipe starts
  try {
    auto context = std::make_unique<tensorpipe::Context>(tensorpipe::ContextOptions().name("tensorferry"));
    context->registerTransport(0, "uv", tensorpipe::transport::uv::create());
    if (type == DeviceType::cpu) {
      entry.any = tensorpipe::channel::basic::create();
      context->registerChannel(basic_priority, "basic", entry.any);
#if TENSORPIPE_HAS_CMA_CHANNEL
      context->registerChannel(cma_priority, "cma", tensorpipe::channel::cma::create());
#endif
    } else {
      entry.any = gpu::register_channels(*context);
    }
    entry.context = std::move(context);
  } catch (const std::exception& error) {
    entry.failed = {Code::channel_unavailable, formatted("TensorPipe does not start: {}", error.what())};
  }
  return entry;
}

Result<tensorpipe::Context*> Contexts::of(DeviceType type) {
  const std::lock_guard lock(mutex_);
  auto& found = entry(type);
  if (!found.failed.ok()) return found.failed;
  return found.context.get();
}

std::string Contexts::why_not(Device device) {
  if (device.type != DeviceType::cpu && device.type != DeviceType::cuda)
    return formatted("tensorpipe carries CPU memory and GPU memory, not {}", text_of(device));
  if (device.type == DeviceType::cuda && !gpu::why_missing().empty()) return gpu::why_missing();
  const std::lock_guard lock(mutex_);
  const auto& found = entry(device.type);
  if (!found.failed.ok()) return std::string(found.failed.what());
  if (found.any && found.any->isViable() && found.any->deviceDescriptors().contains(device_of(device))) return {};
  return formatted("TensorPipe sees no {}", text_of(device));
}

tensorpipe::Device device_of(Device device) {
  const bool gpu = device.type == DeviceType::cuda;
  return {gpu ? tensorpipe::kCudaDeviceType : tensorpipe::kCpuDeviceType, gpu ? device.index : 0};
}

}  // namespace tensorferry::tp
