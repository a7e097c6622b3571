#include "channels/cuda_gdr/flush.h"

#include <atomic>
#include <utility>

#include "channels/cuda/device.h"

namespace tensorferry::cuda_gdr {

using cuda::api;

Flush::Flush(rdma::LocalCards& cards, int device) : cards_(cards), device_(device) {
  CUdevice handle = 0;
  int ordering = 0, options = 0;
  if (api()->device_get(&handle, device) != CUDA_SUCCESS) return;
  api()->device_get_attribute(&ordering, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, handle);
  api()->device_get_attribute(&options, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, handle);
  if (ordering >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER) return;
  means_ = (options & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST) != 0 ? Means::driver : Means::loopback;
}

void Flush::after(const Buffer& memory, const std::vector<ibv::CardFetch::Way>& ways,
                  const rdma::Registration& registration, Completion done) {
  if (means_ == Means::none) return done({});
  if (means_ == Means::driver) {
    const cuda::DeviceGuard here(device_);
    if (!here.status().ok()) return done(here.status());
    const auto result = api()->flush_gpu_direct_writes(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                                                       CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
    return done(cuda::status_of(result, "flushing a network card's writes"));
  }
  struct Reads {
    std::atomic<std::size_t> left;
    Mutex mutex;
    Status failure;
    Completion done;
  };
  const auto reads = std::make_shared<Reads>();
  reads->left = ways.size();
  reads->done = std::move(done);
  const auto one_done = [reads](const Status& status) {
    if (!status.ok()) {
      const std::lock_guard lock(reads->mutex);
      reads->failure = status;
    }
    if (reads->left.fetch_sub(1) == 1) reads->done(reads->failure);
  };
  for (const auto& way : ways) {
    const auto back = loopback(way.port);
    if (!back.ok()) {
      one_done(back.status());
      continue;
    }
    (*back)->read(reinterpret_cast<std::uintptr_t>(memory.data), registration.keys(way.card).remote, one_done);
  }
}

Result<std::shared_ptr<rdma::Loopback>> Flush::loopback(std::size_t port) {
  const std::lock_guard lock(mutex_);
  auto& known = loopbacks_[port];
  if (known != nullptr && !known->failed()) return known;
  auto made = rdma::Loopback::make(cards_, port);
  if (made.ok()) known = *made;
  return made;
}

}  // namespace tensorferry::cuda_gdr
