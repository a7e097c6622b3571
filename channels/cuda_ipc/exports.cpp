#include "channels/cuda_ipc/exports.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "base/text.h"
#include "channels/cuda/device.h"
#include "channels/cuda/invalidate.h"

namespace tensorferry::cuda_ipc {

using cuda::api;

struct Exports::Allocation {
  CUdeviceptr base = 0;
  std::uint64_t bytes = 0;
  std::uint64_t memory = 0;
  bool chunk = false;   // physical memory mapped by the virtual memory API, as torch's expandable segments are
  bool handle = false;  // cudaMalloc's memory, which IPC handles can export
  bool fabric = false;  // can be exported by fabric handles alone, which this channel does not use
};

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

std::variant<Exports::Export*, Refusal> Exports::export_at(CUdeviceptr address, CUdeviceptr& base) {
  Attributes found;
  if (const auto failed = read_attributes(address, found); failed != CUDA_SUCCESS)
    return Refusal{formatted("the driver does not know the buffer's memory: {}", cuda::name_of(failed))};
  Allocation allocation;
  allocation.chunk = (found.handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0 && found.pool == nullptr;
  allocation.handle = found.legacy != 0;
  allocation.fabric = (found.handle_types & CU_MEM_HANDLE_TYPE_FABRIC) != 0;
  allocation.base = allocation.chunk ? found.mapping_start : found.range_start;
  allocation.bytes = allocation.chunk ? found.mapping_bytes : found.range_bytes;
  allocation.memory = allocation.chunk ? found.block_id : found.buffer_id;
  if (allocation.bytes == 0 || address - allocation.base >= allocation.bytes)
    return Refusal{"the driver does not name the allocation of the buffer"};
  base = allocation.base;
  const auto at = exports_.find(base);
  if (at != exports_.end()) {
    if (at->second.memory == allocation.memory && at->second.bytes == allocation.bytes) return &at->second;
    take_back(at->second);
    exports_.erase(at);
  }
  auto made = make(allocation);
  if (auto* refusal = std::get_if<Refusal>(&made)) return std::move(*refusal);
  return &exports_.insert_or_assign(base, std::get<Export>(made)).first->second;
}

std::variant<Exports::Export, Refusal> Exports::make(const Allocation& allocation) {
  if (allocation.chunk) return make_chunk(allocation);
  if (!allocation.handle && allocation.fabric) {
    return Refusal{
        "its memory has a fabric handle (IMEX) and no file descriptor; in torch, "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False makes memory that can be exported"};
  }
  if (!allocation.handle) return Refusal{"its memory cannot be exported (it comes from a memory pool, or is managed)"};
  if (within_process_) return Refusal{"cudaMalloc's memory cannot be opened by the process that it belongs to"};
  return make_handle(allocation);
}

std::variant<Exports::Export, Refusal> Exports::make_handle(const Allocation& allocation) {
  CUipcMemHandle handle{};
  if (const auto failed = api()->ipc_get_mem_handle(&handle, allocation.base); failed != CUDA_SUCCESS)
    return Refusal{formatted("the driver exports no handle: {}", cuda::name_of(failed))};
  Export made{.id = next_++, .bytes = allocation.bytes, .memory = allocation.memory};
  AllocationHandle message{.id = made.id, .bytes = allocation.bytes};
  static_assert(sizeof message.handle == sizeof handle);
  std::memcpy(message.handle.data(), &handle, sizeof handle);
  wire_->with([&](Wire& wire) { made.told_in = wire.control(encode(message), {}); });
  return made;
}

std::variant<Exports::Export, Refusal> Exports::make_chunk(const Allocation& allocation) {
  const auto window = allocation.base >> window_bits;
  const auto offset = allocation.base & (window_bytes - 1);
  if (offset + allocation.bytes > window_bytes) return Refusal{"its memory lies across the edge of a window"};
  CUmemGenericAllocationHandle handle = 0;
  auto failed = api()->mem_retain_allocation_handle(&handle, reinterpret_cast<void*>(allocation.base));
  if (failed != CUDA_SUCCESS) return Refusal{formatted("the driver gives no handle: {}", cuda::name_of(failed))};
  int descriptor = -1;
  failed = api()->mem_export(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  api()->mem_release(handle);
  if (failed != CUDA_SUCCESS) return Refusal{formatted("the driver exports no handle: {}", cuda::name_of(failed))};
  Export made{.id = next_++, .bytes = allocation.bytes, .memory = allocation.memory, .chunk = true};
  Descriptors descriptors;
  descriptors.emplace_back(descriptor);
  const Chunk message{made.id, window, offset, allocation.bytes};
  wire_->with([&](Wire& wire) { made.told_in = wire.control(encode(message), std::move(descriptors)); });
  return made;
}

std::variant<Exports::Found, Refusal> Exports::find(const std::byte* data, std::size_t bytes, bool waits) {
  const bool untracked = cuda_memory_is_untracked();
  const std::lock_guard lock(mutex_);
  Found found;
  const auto refuse = [&](Refusal refusal) {
    end_uses(found.uses);
    return refusal;
  };
  const auto begin = cuda::address_of(data);
  for (auto at = begin; at < begin + bytes;) {
    CUdeviceptr base = 0;
    auto looked = export_at(at, base);
    if (auto* refusal = std::get_if<Refusal>(&looked)) return refuse(std::move(*refusal));
    auto& here = *std::get<Export*>(looked);
    if (here.state == Export::failed) return refuse(Refusal{"the peer could not map its memory"});
    if (here.state == Export::told) {
      if (!waits) return refuse(Refusal{"the peer is mapping its memory", true});
      found.after = std::max(found.after, here.told_in);
    }
    if (!here.chunk && begin + bytes > base + here.bytes) return refuse({"it lies across two allocations"});
    if (at == begin) {
      found.ticket.chunked = here.chunk;
      found.ticket.base = here.chunk ? begin >> window_bits : here.id;
      found.ticket.offset = here.chunk ? begin & (window_bytes - 1) : begin - base;
    } else if (!here.chunk || at >> window_bits != found.ticket.base) {
      return refuse({"it lies across two allocations"});
    }
    at = base + here.bytes;
    if (untracked) {
      ++here.uses;
      found.uses.push_back(here.id);
    }
  }
  found.ticket.bytes = bytes;
  return found;
}

void Exports::release(const std::vector<std::uint64_t>& uses) {
  if (uses.empty()) return;
  const std::lock_guard lock(mutex_);
  end_uses(uses);
}

void Exports::end_uses(const std::vector<std::uint64_t>& uses) {
  for (const auto id : uses) {
    const auto used = [&](const auto& entry) { return entry.second.id == id; };
    const auto it = std::find_if(exports_.begin(), exports_.end(), used);
    if (it == exports_.end() || --it->second.uses != 0) continue;  // or other memory was found at its address
    take_back(it->second);
    exports_.erase(it);
  }
}

void Exports::opened(const Opened& message) {
  const std::lock_guard lock(mutex_);
  for (auto& [base, each] : exports_) {
    if (each.id == message.id) each.state = message.ok ? Export::mapped : Export::failed;
  }
}

void Exports::invalidate(const std::byte* base, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto begin = cuda::address_of(base);
  std::erase_if(exports_, [&](const auto& entry) {
    const auto& [start, each] = entry;
    const bool gone = start < begin + bytes && begin < start + each.bytes;
    if (gone) take_back(each);
    return gone;
  });
}

void Exports::take_back(const Export& gone) {
  wire_->with([&](Wire& wire) { wire.control(encode(AllocationFreed{gone.id}), {}); });
}

}  // namespace tensorferry::cuda_ipc
