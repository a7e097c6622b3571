/// Registers the memory of torch tensors with network cards ahead of their first use (channels/allocations.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

#include "base/status.h"

namespace tensorferry {

/// Memory that stays registered until the last copy of `hold` is dropped.
struct RegisteredMemory {
  std::shared_ptr<void> hold;
  std::size_t bytes = 0;
};

/// Announces the whole storage of `tensor`. Cards that agents of this process use register it before this returns;
/// those that come later, at its first use. The memory stays allocated and at its address while it is held, even if the
/// storage is resized or moved; then the storage's new memory is not registered. InvalidArgument: the tensor has no
/// storage on the CPU.
Result<RegisteredMemory> register_ahead(const at::Tensor& tensor);

}  // namespace tensorferry
