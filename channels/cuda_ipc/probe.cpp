#include "channels/cuda_ipc/probe.h"

#include <algorithm>
#include <utility>

#include "channels/cuda/copy_timer.h"

namespace tensorferry::cuda_ipc {
namespace {

using cuda::api;
using cuda::DeviceGuard;

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return wanted;
}

}  // namespace

Result<std::shared_ptr<ProbeMemory>> ProbeMemory::make(int device, std::uint64_t nonce) {
  auto made = make(device, nonce, probe_bytes);
  if (!made.ok() && made.status().code() == Code::resource_exhausted) made = make(device, nonce, small_probe_bytes);
  return made;
}

Result<std::shared_ptr<ProbeMemory>> ProbeMemory::make(int device, std::uint64_t nonce, std::uint64_t bytes) {
  const DeviceGuard here(device);
  if (!here.status().ok()) return here.status();
  auto made = std::shared_ptr<ProbeMemory>(new ProbeMemory(device));
  const auto wanted = properties(device);
  CUmemGenericAllocationHandle handle = 0;
  auto result = api()->mem_create(&handle, bytes, &wanted, 0);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "making memory that can be exported");
  int descriptor = -1;
  result = api()->mem_export(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  made->descriptor_ = FileDescriptor(descriptor);
  if (result == CUDA_SUCCESS) result = api()->mem_address_reserve(&made->begin_, bytes, 0, 0, 0);
  if (result == CUDA_SUCCESS) made->bytes_ = bytes;
  if (result == CUDA_SUCCESS) result = api()->mem_map(made->begin_, bytes, 0, handle, 0);
  made->mapped_ = result == CUDA_SUCCESS;
  api()->mem_release(handle);
  CUmemAccessDesc access{wanted.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  if (result == CUDA_SUCCESS) result = api()->mem_set_access(made->begin_, bytes, &access, 1);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "exporting memory");
  cuda::CopyTimer timer;
  timer.copy(made->begin_, cuda::address_of(&nonce), sizeof nonce);
  if (auto status = timer.wait("writing the probe's bytes"); !status.ok()) return status;
  return made;
}

ProbeMemory::~ProbeMemory() {
  const DeviceGuard here(device_);
  if (!here.status().ok()) return;
  if (mapped_) api()->mem_unmap(begin_, bytes_);
  if (bytes_ != 0) api()->mem_address_free(begin_, bytes_);
}

Result<double> probe(FileDescriptor memory, std::uint64_t nonce, std::uint64_t bytes, int device,
                     const ProbeMemory& mine) {
  const DeviceGuard here(device);
  if (!here.status().ok()) return here.status();
  auto window = Window::reserve(device);
  if (!window) return Status(Code::resource_exhausted, "the driver gives no addresses");
  const auto mapping = Mapping::map(std::move(memory), std::move(window), 0, bytes);
  if (!mapping.ok()) return mapping.status();
  const auto theirs = (*mapping)->begin();
  cuda::CopyTimer timer;
  std::uint64_t found = ~nonce;
  const auto speed = timer.speed(mine.copies(), theirs, std::min(bytes, mine.bytes()) / 2);
  timer.copy(cuda::address_of(&found), mine.copies(), sizeof found);
  if (auto status = timer.wait("copying from the peer's GPU"); !status.ok()) return status;
  if (found != nonce)
    return Status(Code::channel_unavailable,
                  "the bytes copied from the peer's GPU are not the bytes that the peer wrote");
  return speed;
}

}  // namespace tensorferry::cuda_ipc
