#include "channels/cuda_gdr/probe_page.h"

#include <utility>

#include "base/host.h"
#include "channels/cuda/copy_timer.h"
#include "channels/cuda/device.h"

namespace tensorferry::cuda_gdr {

using cuda::api;
using cuda::DeviceGuard;

Result<std::shared_ptr<ProbePage>> ProbePage::make(int device, std::shared_ptr<rdma::Registrations> registrations) {
  const DeviceGuard here(device);
  if (!here.status().ok()) return here.status();
  std::shared_ptr<ProbePage> made(new ProbePage(device, std::move(registrations)));
  // Not cuMemAlloc, which waits for the GPU's work (cuda::CopyTimer).
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  wanted.allocFlags.gpuDirectRDMACapable = 1;
  CUmemGenericAllocationHandle handle = 0;
  auto result = api()->mem_create(&handle, bytes, &wanted, 0);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "making memory that a network card reaches");
  result = api()->mem_address_reserve(&made->begin_, bytes, 0, 0, 0);
  if (result == CUDA_SUCCESS) result = api()->mem_map(made->begin_, bytes, 0, handle, 0);
  made->mapped_ = result == CUDA_SUCCESS;
  api()->mem_release(handle);
  const CUmemAccessDesc access{wanted.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  if (result == CUDA_SUCCESS) result = api()->mem_set_access(made->begin_, bytes, &access, 1);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "mapping memory that a network card reaches");
  made->nonce_ = random_word();
  cuda::CopyTimer copies;
  copies.copy(made->begin_, cuda::address_of(&made->nonce_), sizeof made->nonce_);
  if (auto written = copies.wait("writing the probe's bytes"); !written.ok()) return written;
  return made;
}

ProbePage::~ProbePage() {
  registration_.reset();
  const DeviceGuard here(device_);
  if (!here.status().ok()) return;
  if (mapped_) api()->mem_unmap(begin_, bytes);
  if (begin_ != 0) api()->mem_address_free(begin_, bytes);
}

Result<std::shared_ptr<rdma::Registration>> ProbePage::registration(const std::vector<std::size_t>& cards) {
  auto made = registrations_->make(reinterpret_cast<std::byte*>(begin_), bytes, rdma::Access::offered, cards);
  if (!made.ok()) return made;
  const std::lock_guard lock(mutex_);
  registration_ = *made;  // the next call finds it, and adds its cards
  return made;
}

Buffer ProbePage::take_landing() {
  constexpr auto places = bytes / line - 1;
  const auto at = line * (1 + landings_.fetch_add(1, std::memory_order_relaxed) % places);
  return {{DeviceType::cuda, static_cast<std::uint8_t>(device_)},
          reinterpret_cast<std::byte*>(begin_ + at),
          sizeof(std::uint64_t),
          nullptr,
          nullptr};
}

Result<std::uint64_t> ProbePage::landed(const Buffer& landing) const {
  const DeviceGuard here(device_);
  if (!here.status().ok()) return here.status();
  std::uint64_t word = 0;
  cuda::CopyTimer copies;
  copies.copy(cuda::address_of(&word), cuda::address_of(landing.data), sizeof word);
  if (auto read = copies.wait("reading the probe's bytes"); !read.ok()) return read;
  return word;
}

}  // namespace tensorferry::cuda_gdr
