#include "channels/cuda_gdr/gpu_memory.h"

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/text.h"
#include "channels/cuda/allocation.h"
#include "channels/cuda/device.h"
#include "channels/rdma/verbs.h"

namespace tensorferry::cuda_gdr {

namespace {

using cuda::api;

constexpr CUdeviceptr page = 4096;

std::optional<int> attribute_of(int device, CUdevice_attribute attribute) {
  CUdevice handle = 0;
  int value = 0;
  if (api() == nullptr || api()->device_get(&handle, device) != CUDA_SUCCESS) return std::nullopt;
  if (api()->device_get_attribute(&value, attribute, handle) != CUDA_SUCCESS) return std::nullopt;
  return value;
}

Result<rdma::CardMemory> register_dma_buf(const std::shared_ptr<rdma::OpenCard>& card, CUdeviceptr address,
                                          std::size_t bytes, unsigned access, int device) {
  if (attribute_of(device, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED).value_or(0) == 0)
    return Status(Code::channel_unavailable, "the CUDA driver exports no dma-buf");
  const auto begin = address / page * page;
  const auto whole = (address + bytes + page - 1) / page * page - begin;
  int descriptor = -1;
  const auto exported = api()->mem_get_range_handle(&descriptor, begin, whole, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  if (exported != CUDA_SUCCESS) return cuda::status_of(exported, "exporting a dma-buf");
  return rdma::CardMemory::make_of_dma_buf(card, FileDescriptor(descriptor), address - begin, address, bytes, access);
}

}  // namespace

std::optional<Refusal> refusal_of_gpu(int device) {
  if (api() == nullptr) return Refusal{cuda::why_missing()};
  if (attribute_of(device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED).value_or(0) == 0)
    return Refusal{formatted("cuda:{} has no GPUDirect RDMA: network cards do not reach its memory", device)};
  return std::nullopt;
}

std::variant<Allocations::Allocation, Refusal> allocation_of(const std::byte* data, std::size_t bytes) {
  const auto begin = cuda::address_of(data);
  CUdeviceptr base = 0, end = begin;
  std::vector<std::uint64_t> pieces;
  while (end < begin + bytes) {
    auto found = cuda::allocation_at(end);
    if (auto* refusal = std::get_if<Refusal>(&found)) return std::move(*refusal);
    const auto& piece = std::get<cuda::GpuAllocation>(found);
    if (!pieces.empty() && !piece.chunk) return Refusal{"it lies across two allocations"};
    if (pieces.empty()) base = piece.base;
    end = piece.base + piece.bytes;
    pieces.push_back(piece.memory);
    if (!piece.chunk && end < begin + bytes) return Refusal{"it lies across two allocations"};
  }
  return Allocations::of_this_process().find_on_device(reinterpret_cast<std::byte*>(base), end - base, pieces);
}

Result<rdma::CardMemory> register_gpu_memory(std::shared_ptr<rdma::OpenCard> card, std::byte* data, std::size_t bytes,
                                             unsigned access) {
  const auto address = cuda::address_of(data);
  int device = -1;
  CUpointer_attribute name = CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
  void* value = &device;
  if (const auto asked = api()->pointer_get_attributes(1, &name, &value, address); asked != CUDA_SUCCESS || device < 0)
    return Status(Code::channel_unavailable, "the memory that is to be registered is not a GPU's");
  const cuda::DeviceGuard here(device);
  if (!here.status().ok()) return here.status();
  auto made = register_dma_buf(card, address, bytes, access, device);
  if (made.ok() || made.status().code() == Code::resource_exhausted) return made;
  auto* const region = rdma::register_memory(card->verbs(), card->domain(), data, bytes, access);
  if (region != nullptr) return rdma::CardMemory(std::move(card), region);
  const auto by_module = rdma::status_of(errno, formatted("ibv_reg_mr on {}", card->name()));
  return Status(by_module.code(),
                formatted("registering {} bytes of cuda:{} with {} failed: by dma-buf, {}; by nvidia-peermem, {}. Load "
                          "the module (modprobe nvidia-peermem), or use the NVIDIA driver's open kernel modules with "
                          "Linux 5.12 or newer",
                          bytes, device, card->name(), made.status().what(), by_module.what()));
}

std::string bus_id_of(int device) {
  const auto domain = attribute_of(device, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
  const auto bus = attribute_of(device, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
  const auto slot = attribute_of(device, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
  if (!domain || !bus || !slot) return {};
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%04x:%02x:%02x.0", static_cast<unsigned>(*domain),
                static_cast<unsigned>(*bus), static_cast<unsigned>(*slot));
  return text.data();
}

}  // namespace tensorferry::cuda_gdr
