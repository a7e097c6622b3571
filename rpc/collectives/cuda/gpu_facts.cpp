#include "rpc/collectives/cuda/gpu_facts.h"

#include <algorithm>

#include "channels/cuda/device.h"
#include "rpc/collectives/cuda/nvml.h"

namespace tensorferry::collectives::cuda {

namespace driver = tensorferry::cuda;
using driver::api;

GpuFacts facts_of(int device) {
  GpuFacts out;
  CUdevice handle = 0;
  if (api() == nullptr || api()->device_get(&handle, device) != CUDA_SUCCESS) {
    out.unknown = FixedText<160>("the driver does not know the GPU");
    return out;
  }
  const auto uuid = driver::uuid_of(device).value_or("");
  std::copy_n(uuid.begin(), std::min(uuid.size(), out.uuid.size()), out.uuid.begin());
  std::array<char, 64> name{};
  if (api()->device_get_name(name.data(), static_cast<int>(name.size()) - 1, handle) == CUDA_SUCCESS) {
    out.name = FixedText<64>(std::string_view(name.data()));
  }
  auto result = CUDA_SUCCESS;
  const auto ask = [&](std::uint32_t& value, CUdevice_attribute attribute) {
    int answer = 0;
    if (result == CUDA_SUCCESS) result = api()->device_get_attribute(&answer, attribute, handle);
    value = static_cast<std::uint32_t>(answer);
  };
  ask(out.pci.domain, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
  ask(out.pci.bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
  ask(out.pci.device, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
  if (result != CUDA_SUCCESS) {
    out.unknown = FixedText<160>("the driver does not tell the GPU's PCI address");
    return out;
  }
  add_facts_of_nvml(out);
  return out;
}

PairFacts facts_between(int device, const GpuFacts& own, const GpuFacts& other) {
  if (own.uuid == other.uuid) return {PairFacts::PeerAccess::yes, 0};
  auto out = pair_facts_of_nvml(own.pci, other.pci);
  const auto there = driver::device_of(std::string_view(other.uuid.data(), other.uuid.size()));
  CUdevice mine = 0, theirs = 0;
  int can = 0;
  if (there && api()->device_get(&mine, device) == CUDA_SUCCESS && api()->device_get(&theirs, *there) == CUDA_SUCCESS &&
      api()->device_can_access_peer(&can, mine, theirs) == CUDA_SUCCESS) {
    out.peer_access = can != 0 ? PairFacts::PeerAccess::yes : PairFacts::PeerAccess::no;
  }
  return out;
}

}  // namespace tensorferry::collectives::cuda
