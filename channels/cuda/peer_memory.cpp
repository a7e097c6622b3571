#include "channels/cuda/peer_memory.h"

#include <variant>

#include "base/text.h"
#include "channels/cuda/allocation.h"
#include "channels/cuda/device.h"
#include "channels/cuda/event_poller.h"

namespace tensorferry::cuda {

namespace {

/// Returns whether an allocation of this process has at least `bytes` bytes from `address` on.
bool holds(CUdeviceptr address, std::uint64_t bytes) {
  const auto found = allocation_at(address);
  const auto* const allocation = std::get_if<GpuAllocation>(&found);
  return allocation != nullptr && allocation->bytes - (address - allocation->base) >= bytes;
}

/// Returns the bytes of the allocation that a handle has mapped at `address`; 0: the driver does not tell.
std::uint64_t mapped_at(CUdeviceptr address) {
  std::size_t bytes = 0;
  CUpointer_attribute name = CU_POINTER_ATTRIBUTE_RANGE_SIZE;
  void* value = &bytes;
  return api()->pointer_get_attributes(1, &name, &value, address) == CUDA_SUCCESS ? bytes : 0;
}

Status smaller() { return {Code::channel_unavailable, "the memory of a peer's GPU is smaller than the peer says"}; }

}  // namespace

Result<BufferOffer> offer_of(CUdeviceptr address, int device) {
  BufferOffer out;
  out.address = address;
  out.process = cma::own_identity().value_or(cma::Identity{});
  out.device = device;
  const auto result = api()->ipc_get_mem_handle(&out.handle, address);
  if (result != CUDA_SUCCESS) return status_of(result, "exporting memory of a GPU to other processes");
  return out;
}

Result<std::shared_ptr<PeerMemory>> PeerMemory::open(const BufferOffer& theirs, int device, std::uint64_t bytes) {
  const bool shares_process = theirs.process.pid != 0 && theirs.process == cma::own_identity();
  if (shares_process) {
    if (!holds(theirs.address, bytes)) return smaller();
    if (theirs.device != device) {
      CUdevice mine = 0, other = 0;
      int can = 0;
      auto result = api()->device_get(&mine, device);
      if (result == CUDA_SUCCESS) result = api()->device_get(&other, theirs.device);
      if (result == CUDA_SUCCESS) result = api()->device_can_access_peer(&can, mine, other);
      if (result != CUDA_SUCCESS || can == 0) {
        return Status(Code::channel_unavailable,
                      formatted("cuda:{} has no peer access to cuda:{}", device, theirs.device));
      }
      allow_peer(device, theirs.device);
    }
    return std::shared_ptr<PeerMemory>(new PeerMemory(theirs.address, device, false));
  }
  CUdeviceptr address = 0;
  const auto result = api()->ipc_open_mem_handle(&address, theirs.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (result != CUDA_SUCCESS) return status_of(result, "mapping the memory of a peer's GPU");
  auto opened = std::shared_ptr<PeerMemory>(new PeerMemory(address, device, true));
  if (mapped_at(address) < bytes) return smaller();
  return opened;
}

PeerMemory::~PeerMemory() {
  if (!mapped_) return;
  background().submit([device = device_, address = address_] {
    const DeviceGuard here(device);
    if (here.status().ok()) api()->ipc_close_mem_handle(address);
  });
}

}  // namespace tensorferry::cuda
