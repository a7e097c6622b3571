#include "channels/cuda_ipc/exports.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "channels/cuda/device.h"
#include "channels/cuda/invalidate.h"

namespace tensorferry::cuda_ipc {

using cuda::api;

namespace {

constexpr std::string_view across_windows = "its addresses cross a multiple of 256 GiB, where cuda_ipc's windows meet";
static_assert(window_bytes == std::uint64_t{256} << 30);

}  // namespace

std::variant<Exports::Export*, Refusal> Exports::export_of(const Piece& piece) {
  const auto at = exports_.find(piece.allocation.base);
  if (at != exports_.end()) {
    if (at->second.generation == piece.generation) return &at->second;
    take_back(at->second);
    exports_.erase(at);
  }
  auto made = make(piece.allocation);
  if (auto* refusal = std::get_if<Refusal>(&made)) return std::move(*refusal);
  std::get<Export>(made).generation = piece.generation;
  return &exports_.insert_or_assign(piece.allocation.base, std::get<Export>(made)).first->second;
}

std::variant<Exports::Export, Refusal> Exports::make(const cuda::GpuAllocation& allocation) {
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

std::variant<Exports::Export, Refusal> Exports::make_handle(const cuda::GpuAllocation& allocation) {
  CUipcMemHandle handle{};
  if (const auto failed = api()->ipc_get_mem_handle(&handle, allocation.base); failed != CUDA_SUCCESS)
    return Refusal{formatted("the driver exports no handle: {}", cuda::name_of(failed))};
  Export made{.id = next_++, .bytes = allocation.bytes};
  AllocationHandle message{.id = made.id, .bytes = allocation.bytes};
  static_assert(sizeof message.handle == sizeof handle);
  std::memcpy(message.handle.data(), &handle, sizeof handle);
  wire_->with([&](Wire& wire) { made.told_in = wire.control(encode(message), {}); });
  return made;
}

std::variant<Exports::Export, Refusal> Exports::make_chunk(const cuda::GpuAllocation& allocation) {
  const auto window = allocation.base >> window_bits;
  const auto offset = allocation.base & (window_bytes - 1);
  if (offset + allocation.bytes > window_bytes) return Refusal{std::string(across_windows)};
  CUmemGenericAllocationHandle handle = 0;
  auto failed = api()->mem_retain_allocation_handle(&handle, reinterpret_cast<void*>(allocation.base));
  if (failed != CUDA_SUCCESS) return Refusal{formatted("the driver gives no handle: {}", cuda::name_of(failed))};
  int descriptor = -1;
  failed = api()->mem_export(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  api()->mem_release(handle);
  if (failed != CUDA_SUCCESS) return Refusal{formatted("the driver exports no handle: {}", cuda::name_of(failed))};
  Export made{.id = next_++, .bytes = allocation.bytes, .chunk = true};
  Descriptors descriptors;
  descriptors.emplace_back(descriptor);
  const Chunk message{made.id, window, offset, allocation.bytes};
  wire_->with([&](Wire& wire) { made.told_in = wire.control(encode(message), std::move(descriptors)); });
  return made;
}

std::variant<std::vector<Exports::Piece>, Refusal> Exports::pieces_of(CUdeviceptr begin, std::size_t bytes) {
  std::vector<Piece> pieces;
  for (auto at = begin; at < begin + bytes;) {
    auto found = cuda::allocation_at(at);
    if (auto* refusal = std::get_if<Refusal>(&found)) return std::move(*refusal);
    const auto& allocation = std::get<cuda::GpuAllocation>(found);
    auto* const base = reinterpret_cast<std::byte*>(allocation.base);
    const auto known =
        Allocations::of_this_process().find_on_device(base, allocation.bytes, std::span(&allocation.memory, 1));
    pieces.push_back({allocation, known.generation});
    at = allocation.base + allocation.bytes;
  }
  return pieces;
}

std::variant<Exports::Found, Refusal> Exports::find(const std::byte* data, std::size_t bytes, bool waits) {
  const bool untracked = cuda_memory_is_untracked();
  const auto begin = cuda::address_of(data);
  const auto pieces = pieces_of(begin, bytes);  // without the lock, which gone() needs
  if (const auto* refusal = std::get_if<Refusal>(&pieces)) return *refusal;
  const std::lock_guard lock(mutex_);
  Found found;
  const auto refuse = [&](Refusal refusal) {
    end_uses(found.uses);
    return refusal;
  };
  auto at = begin;
  for (const auto& piece : std::get<std::vector<Piece>>(pieces)) {
    const auto base = piece.allocation.base;
    auto looked = export_of(piece);
    if (auto* refusal = std::get_if<Refusal>(&looked)) return refuse(std::move(*refusal));
    auto& here = *std::get<Export*>(looked);
    if (here.state == Export::failed) return refuse(Refusal{"the peer could not map its memory"});
    if (here.state == Export::told) {
      // The end of untracked memory is not reported: the use that is counted below withdraws the export.
      if (!waits && !untracked) return refuse(Refusal{"the peer is mapping its memory", true});
      found.after = std::max(found.after, here.told_in);
    }
    if (!here.chunk && begin + bytes > base + here.bytes) return refuse({"it lies across two allocations"});
    if (at == begin) {
      found.ticket.chunked = here.chunk;
      found.ticket.base = here.chunk ? begin >> window_bits : here.id;
      found.ticket.offset = here.chunk ? begin & (window_bytes - 1) : begin - base;
    } else if (!here.chunk) {
      return refuse({"it lies across two allocations"});
    } else if (at >> window_bits != found.ticket.base) {
      return refuse({std::string(across_windows)});
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

void Exports::gone(std::uint64_t generation) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(exports_, [&](const auto& entry) {
    const bool ended = entry.second.generation == generation;
    if (ended) take_back(entry.second);
    return ended;
  });
}

void Exports::take_back(const Export& gone) {
  wire_->with([&](Wire& wire) { wire.control(encode(AllocationFreed{gone.id}), {}); });
}

}  // namespace tensorferry::cuda_ipc
