#include "converters/cpu.h"

#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "converters/kept.h"

namespace tensorferry {
namespace {

constexpr std::size_t alignment = 16;  // of complex128, the largest element type

c10::Storage storage_of(std::size_t bytes, at::DataPtr data) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                               c10::GetCPUAllocator(), /*resizable=*/true);
}

}  // namespace

c10::Storage storage_over(Buffer buffer) {
  auto* const bytes = buffer.data;
  auto* const owner = new Owner(std::move(buffer.owner));
  return storage_of(buffer.bytes, at::DataPtr(bytes, owner, &drop_owner, at::Device(at::kCPU)));
}

Result<Buffer> CpuConverter::to_buffer(const c10::Storage& storage, std::size_t offset, std::size_t bytes) {
  // Calls the const data(), because a sender only reads: the other one would materialise a copy-on-write storage.
  auto* data = const_cast<std::byte*>(static_cast<const std::byte*>(storage.data()));
  if (data != nullptr) data += offset;
  return Buffer{Device{}, data, bytes, nullptr, std::make_shared<KeptStorage>(storage, leaves_storages_)};
}

Result<c10::Storage> CpuConverter::to_storage(Buffer buffer) {
  const auto device = at::Device(at::kCPU);
  if (buffer.bytes == 0) return storage_of(0, at::DataPtr(nullptr, device));
  if (reinterpret_cast<std::uintptr_t>(buffer.data) % alignment != 0) {
    auto data = c10::GetCPUAllocator()->allocate(buffer.bytes);
    std::memcpy(data.get(), buffer.data, buffer.bytes);
    return storage_of(buffer.bytes, std::move(data));
  }
  return storage_over(std::move(buffer));
}

}  // namespace tensorferry
