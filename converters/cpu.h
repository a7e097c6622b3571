/// The converter for CPU tensors: sends from a tensor's own memory, receives into pooled memory.
#pragma once

#include <memory>

#include "channels/host_memory.h"
#include "converters/registry.h"

namespace tensorferry {

/// Wraps CPU memory, without a copy, in a storage that owns it. The storage has torch's CPU allocator and is resizable.
c10::Storage storage_over(Buffer buffer);

class CpuConverter final : public Converter {
 public:
  /// `leaves_storages` is called before a sent storage is released. If it returns true, the storage is leaked instead:
  /// its deleter may need an interpreter that has ended (the deleter of a numpy array does).
  explicit CpuConverter(std::shared_ptr<HostMemory> memory, bool (*leaves_storages)() = nullptr)
      : memory_(std::move(memory)), leaves_storages_(leaves_storages) {}

  Result<Buffer> to_buffer(const c10::Storage& storage, std::size_t offset, std::size_t bytes) override;

  /// Wraps the buffer without a copy if its address is a multiple of 16 bytes, the alignment of the largest element
  /// type; else copies it. The storage has torch's CPU allocator and is resizable, so every operation on torch's own
  /// storages works on it. A storage of from_blob() would refuse resize_, and lose its owner in share_memory_.
  Result<c10::Storage> to_storage(Buffer buffer) override;

  [[nodiscard]] std::shared_ptr<Memory> memory() const override { return memory_; }

 private:
  std::shared_ptr<HostMemory> memory_;
  bool (*leaves_storages_)();
};

}  // namespace tensorferry
