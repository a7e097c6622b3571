/// CPU tensors: sent from where they lie, received into pooled memory.
#pragma once

#include <memory>

#include "channels/host_memory.h"
#include "converters/registry.h"

namespace tensorferry {

/// CPU memory as a storage that owns it, without a copy; has torch's CPU allocator and is resizable.
c10::Storage storage_over(Buffer buffer);

class CpuConverter final : public Converter {
 public:
  /// `leaves_storages`: asked before a storage that was sent is let go. True leaves it to the end of the process: its
  /// deleter may need an interpreter that is gone (a numpy array's does).
  explicit CpuConverter(std::shared_ptr<HostMemory> memory, bool (*leaves_storages)() = nullptr)
      : memory_(std::move(memory)), leaves_storages_(leaves_storages) {}

  Result<Buffer> to_buffer(const c10::Storage& storage, std::size_t offset, std::size_t bytes) override;

  /// Wraps the buffer without a copy where it is aligned as torch's own memory is in so far as elements need it (16
  /// bytes), else copies. The storage has torch's CPU allocator and is resizable, so that all that torch can do to its
  /// own storages works on it: from_blob()'s refuse resize_, and lose their owner in share_memory_.
  Result<c10::Storage> to_storage(Buffer buffer) override;

  [[nodiscard]] std::shared_ptr<Memory> memory() const override { return memory_; }

 private:
  std::shared_ptr<HostMemory> memory_;
  bool (*leaves_storages_)();
};

}  // namespace tensorferry
