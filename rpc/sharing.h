/// Torch tensors in memory that can be handed over without a copy (channels/region.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "channels/buffer.h"
#include "channels/status.h"

namespace tensorferry {

/// A contiguous CPU tensor of zeros, alone in a region; its storage is like any that torch allocates itself, and leaves
/// the region where it is resized to more. ResourceExhausted: no memory, or no descriptor (each region holds one).
Result<at::Tensor> empty_to_share(std::span<const std::int64_t> sizes, at::ScalarType type);

/// The part of a region that a tensor's elements lie in.
struct SharedBytes {
  Buffer buffer;           // owns the region; no bytes where the tensor has no elements
  std::size_t offset = 0;  // of the tensor's first element; a multiple of its size
};
/// InvalidArgument says why this tensor's memory cannot be handed over.
Result<SharedBytes> shared_bytes(const at::Tensor& tensor);

}  // namespace tensorferry
