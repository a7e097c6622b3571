#include "rpc/collectives/cuda/multicast_driver.h"

#include "base/environment.h"
#include "channels/cuda/device.h"

namespace tensorferry::collectives::cuda {
namespace {

namespace driver = tensorferry::cuda;
using driver::api;

constexpr int version_with_multicast = 12010;

MulticastDriver load() {
  MulticastDriver out;
  if (api() == nullptr) return out;
  auto find = driver::driver_functions(version_with_multicast);
  find(out.get_granularity, "cuMulticastGetGranularity");
  find(out.create, "cuMulticastCreate");
  find(out.add_device, "cuMulticastAddDevice");
  find(out.bind_memory, "cuMulticastBindMem");
  find(out.unbind, "cuMulticastUnbind");
  find(out.get_allocation_granularity, "cuMemGetAllocationGranularity");
  out.complete = find.missing().empty();
  return out;
}

}  // namespace

const MulticastDriver& MulticastDriver::of_this_process() {
  static const auto& once = *new MulticastDriver(load());
  return once;
}

std::string MulticastDriver::why_not(int device) {
  if (environment::cuda_multicast.value() != "1") return "TENSORFERRY_CUDA_MULTICAST=1 turns it on";
  if (environment::value_of("NCCL_NVLS_ENABLE") == "0") {
    return "NCCL_NVLS_ENABLE=0 says that multicast is turned off on this host";
  }
  if (api() == nullptr) return driver::why_missing();
  CUdevice handle = 0;
  int major = 0, has = 0;
  auto result = api()->device_get(&handle, device);
  if (result == CUDA_SUCCESS) {
    result = api()->device_get_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle);
  }
  if (result == CUDA_SUCCESS) {
    result = api()->device_get_attribute(&has, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, handle);
  }
  if (result != CUDA_SUCCESS || has == 0) return "the GPU or its driver has no multicast";
  if (constexpr int first_with_instructions = 9; major < first_with_instructions) {
    return "the GPU is older than compute capability 9.0";
  }
  return of_this_process().complete ? "" : "the driver has no functions for multicast: it is older than CUDA 12.1";
}

}  // namespace tensorferry::collectives::cuda
