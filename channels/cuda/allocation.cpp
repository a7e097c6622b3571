#include "channels/cuda/allocation.h"

#include <array>

#include "base/text.h"

namespace tensorferry::cuda {
namespace {

/// Pointer attributes of a device address. The driver leaves an unknown attribute at zero.
struct Attributes {
  CUdeviceptr range_start = 0, mapping_start = 0;
  std::size_t range_bytes = 0, mapping_bytes = 0;
  std::uint64_t buffer_id = 0, block_id = 0, handle_types = 0;
  int legacy = 0;
  void* pool = nullptr;
};

CUresult read_attributes(CUdeviceptr address, Attributes& out) {
  std::array<CUpointer_attribute, 9> names{
      CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
      CU_POINTER_ATTRIBUTE_RANGE_SIZE,
      CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
      CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
      CU_POINTER_ATTRIBUTE_BUFFER_ID,
      CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID,
      CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
      CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
      CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
  };
  std::array<void*, 9> values{&out.range_start,   &out.range_bytes, &out.mapping_start,
                              &out.mapping_bytes, &out.buffer_id,   &out.block_id,
                              &out.handle_types,  &out.legacy,      &out.pool};
  return api()->pointer_get_attributes(names.size(), names.data(), values.data(), address);
}

}  // namespace

std::variant<GpuAllocation, Refusal> allocation_at(CUdeviceptr address) {
  Attributes found;
  if (const auto failed = read_attributes(address, found); failed != CUDA_SUCCESS)
    return Refusal{formatted("the driver does not know the buffer's memory: {}", name_of(failed))};
  GpuAllocation allocation;
  allocation.chunk = (found.handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0 && found.pool == nullptr;
  allocation.handle = found.legacy != 0;
  allocation.fabric = (found.handle_types & CU_MEM_HANDLE_TYPE_FABRIC) != 0;
  allocation.base = allocation.chunk ? found.mapping_start : found.range_start;
  allocation.bytes = allocation.chunk ? found.mapping_bytes : found.range_bytes;
  allocation.memory = allocation.chunk ? found.block_id : found.buffer_id;
  if (allocation.bytes == 0 || address - allocation.base >= allocation.bytes)
    return Refusal{"the driver does not name the allocation of the buffer"};
  return allocation;
}

}  // namespace tensorferry::cuda
