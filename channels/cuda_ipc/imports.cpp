#include "channels/cuda_ipc/imports.h"

#include <cstring>
#include <utility>

#include "channels/cuda/event_poller.h"

namespace tensorferry::cuda_ipc {

using cuda::api;
using cuda::DeviceGuard;

std::shared_ptr<Window> Window::reserve(int device) {
  CUdeviceptr begin = 0;
  if (api()->mem_address_reserve(&begin, window_bytes, 0, 0, 0) != CUDA_SUCCESS) return nullptr;
  return std::shared_ptr<Window>(new Window(begin, device));
}

Window::~Window() {
  const DeviceGuard here(device_);
  if (here.status().ok()) api()->mem_address_free(begin_, window_bytes);
}

Result<std::shared_ptr<Mapping>> Mapping::open(const AllocationHandle& handle, int device) {
  const DeviceGuard here(device);
  if (!here.status().ok()) return here.status();
  CUipcMemHandle theirs{};
  std::memcpy(&theirs, handle.handle.data(), sizeof theirs);
  CUdeviceptr begin = 0;
  const auto result = api()->ipc_open_mem_handle(&begin, theirs, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "opening the peer's handle");
  auto mapping = std::shared_ptr<Mapping>(new Mapping(begin, handle.bytes, device, nullptr));
  std::size_t mapped = 0;  // the peer's figure is not trusted
  CUpointer_attribute name = CU_POINTER_ATTRIBUTE_RANGE_SIZE;
  void* value = &mapped;
  if (api()->pointer_get_attributes(1, &name, &value, begin) != CUDA_SUCCESS || mapped < handle.bytes)
    return Status(Code::protocol_error, "the peer's handle covers less memory than was announced");
  return mapping;
}

Result<std::shared_ptr<Mapping>> Mapping::map(FileDescriptor memory, std::shared_ptr<Window> window,
                                              std::uint64_t offset, std::uint64_t bytes) {
  const DeviceGuard here(window->device());
  if (!here.status().ok()) return here.status();
  CUmemGenericAllocationHandle handle = 0;
  auto* const descriptor = reinterpret_cast<void*>(static_cast<std::intptr_t>(memory.get()));
  auto result = api()->mem_import(&handle, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "importing the peer's memory");
  const auto begin = window->begin() + offset;
  result = api()->mem_map(begin, bytes, 0, handle, 0);
  api()->mem_release(handle);  // the mapping keeps the memory
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "mapping the peer's memory");
  CUmemAccessDesc access{};
  access.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = window->device()};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  result = api()->mem_set_access(begin, bytes, &access, 1);
  if (result != CUDA_SUCCESS) {
    api()->mem_unmap(begin, bytes);
    return cuda::status_of(result, "access to the peer's memory");
  }
  const int device = window->device();
  return std::shared_ptr<Mapping>(new Mapping(begin, bytes, device, std::move(window)));
}

Mapping::~Mapping() {
  cuda::background().submit([begin = begin_, bytes = bytes_, device = device_, window = window_] {
    const DeviceGuard here(device);
    if (!here.status().ok()) return;
    if (window)
      api()->mem_unmap(begin, bytes);
    else
      api()->ipc_close_mem_handle(begin);
  });
}

bool Imports::enter(std::uint64_t id, const Import& import) {
  const std::lock_guard lock(mutex_);
  if (cleared_ || imports_.size() >= most_imports || !imports_.try_emplace(id, import).second) return false;
  if (import.chunk) chunks_.insert_or_assign({import.window, import.offset}, id);
  return true;
}

void Imports::add(const AllocationHandle& handle, Resolved opened) {
  if (!enter(handle.id, {0, 0, handle.bytes, false, nullptr, false})) return opened(false);
  cuda::background().submit([self = shared_from_this(), handle, opened = std::move(opened)]() mutable {
    self->resolve(handle.id, Mapping::open(handle, self->device_), std::move(opened));
  });
}

void Imports::add(const Chunk& chunk, FileDescriptor memory, Resolved opened) {
  const bool fits = chunk.bytes > 0 && chunk.bytes <= window_bytes && chunk.offset <= window_bytes - chunk.bytes;
  if (!fits || !enter(chunk.id, {chunk.window, chunk.offset, chunk.bytes, true, nullptr, false})) return opened(false);
  cuda::background().submit(
      [self = shared_from_this(), chunk, memory = std::move(memory), opened = std::move(opened)]() mutable {
        auto window = self->window_of(chunk.window);
        auto mapped = window.ok() ? Mapping::map(std::move(memory), *window, chunk.offset, chunk.bytes)
                                  : Result<std::shared_ptr<Mapping>>(window.status());
        self->resolve(chunk.id, std::move(mapped), std::move(opened));
      });
}

Result<std::shared_ptr<Window>> Imports::window_of(std::uint64_t number) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = windows_.find(number); it != windows_.end()) return it->second;
    if (windows_.size() >= most_windows) return Status(Code::resource_exhausted, "one peer has too many windows");
  }
  const DeviceGuard here(device_);
  if (!here.status().ok()) return here.status();
  auto window = Window::reserve(device_);
  if (!window) return Status(Code::resource_exhausted, "the driver gives no addresses");
  const std::lock_guard lock(mutex_);
  return windows_.try_emplace(number, std::move(window)).first->second;  // only the background thread adds windows
}

void Imports::resolve(std::uint64_t id, Result<std::shared_ptr<Mapping>> mapped, Resolved opened) {
  std::vector<std::pair<Waiting, Result<ImportedMemory>>> due;
  std::shared_ptr<Mapping> unwanted;
  {
    const std::lock_guard lock(mutex_);
    const auto it = imports_.find(id);
    if (it == imports_.end()) {
      if (mapped.ok()) unwanted = std::move(*mapped);
    } else if (mapped.ok()) {
      it->second.mapping = std::move(*mapped);
    } else {
      it->second.failed = true;
    }
    // What takes memory comes before the first one moves: no completion may be lost, or end under this lock.
    std::vector<Waiting> still;
    std::vector<std::optional<Result<ImportedMemory>>> results;
    for (const auto& each : waiting_) results.push_back(lookup(each.ticket));
    still.reserve(waiting_.size());
    due.reserve(waiting_.size());
    for (std::size_t i = 0; i < waiting_.size(); ++i) {
      if (results[i])
        due.emplace_back(std::move(waiting_[i]), *std::move(results[i]));
      else
        still.push_back(std::move(waiting_[i]));
    }
    waiting_.swap(still);
  }
  opened(mapped.ok());
  for (auto& [waiting, result] : due) waiting.found(std::move(result));
}

void Imports::remove(const AllocationFreed& gone) {
  std::shared_ptr<Mapping> mapping;
  const std::lock_guard lock(mutex_);
  const auto it = imports_.find(gone.id);
  if (it == imports_.end()) return;
  if (it->second.chunk) {
    const auto chunk = chunks_.find({it->second.window, it->second.offset});
    if (chunk != chunks_.end() && chunk->second == gone.id) chunks_.erase(chunk);
  }
  mapping = std::move(it->second.mapping);
  imports_.erase(it);
}

void Imports::clear() {
  std::vector<Waiting> waiting;
  {
    const std::lock_guard lock(mutex_);
    cleared_ = true;
    imports_.clear();
    chunks_.clear();
    windows_.clear();
    waiting.swap(waiting_);
  }
  for (auto& each : waiting) each.found(Status(Code::connection_lost, "the link has ended"));
}

std::optional<Result<Imports::ImportedMemory>> Imports::lookup(const CudaIpcTicket& ticket) {
  const auto failed = [] { return Status(Code::channel_unavailable, "the peer's GPU memory could not be mapped"); };
  const auto unknown = [] {
    return Status(Code::protocol_error, "the ticket names GPU memory that was not announced");
  };
  if (cleared_) return Status(Code::connection_lost, "the link has ended");
  ImportedMemory source;
  if (!ticket.chunked) {
    const auto it = imports_.find(ticket.base);
    if (it == imports_.end() || it->second.chunk || ticket.offset + ticket.bytes > it->second.bytes) return unknown();
    if (it->second.failed) return failed();
    if (!it->second.mapping) return std::nullopt;
    source.address = it->second.mapping->begin() + ticket.offset;
    source.mappings.push_back(it->second.mapping);
    return source;
  }
  for (auto at = ticket.offset; at < ticket.offset + ticket.bytes;) {
    auto chunk = chunks_.upper_bound({ticket.base, at});
    if (chunk == chunks_.begin() || (--chunk)->first.first != ticket.base) return unknown();
    const auto& import = imports_.at(chunk->second);
    if (at - import.offset >= import.bytes) return unknown();
    if (import.failed) return failed();
    if (!import.mapping) return std::nullopt;
    if (source.mappings.empty()) source.address = import.mapping->begin() + (at - import.offset);
    source.mappings.push_back(import.mapping);
    at = import.offset + import.bytes;
  }
  return source;
}

void Imports::find(const CudaIpcTicket& ticket, UniqueFunction<void(Result<ImportedMemory>)> found) {
  std::unique_lock lock(mutex_);
  auto result = lookup(ticket);
  if (!result) {
    waiting_.push_back({ticket, std::move(found)});
    return;
  }
  lock.unlock();
  found(std::move(*result));
}

}  // namespace tensorferry::cuda_ipc
