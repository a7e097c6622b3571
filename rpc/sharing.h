/// Torch tensors in memory regions, which are handed over to peers without a copy (channels/region.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "channels/buffer.h"

namespace tensorferry {

/// Makes a contiguous CPU tensor of zeros in a region of its own.
///
/// Its storage behaves like any storage that torch allocates. If it is resized to more bytes, it moves out of the
/// region. InvalidArgument: a size is negative, or the tensor is too large. ResourceExhausted: there is no memory, or
/// no file descriptor (each region holds one).
Result<at::Tensor> empty_to_share(std::span<const std::int64_t> sizes, at::ScalarType type);

/// The part of a region that holds a tensor's elements.
struct SharedBytes {
  Buffer buffer;           // owns the region; empty if the tensor has no elements
  std::size_t offset = 0;  // bytes from its start to the tensor's first element; a multiple of the element size
};
/// Returns the part of a region that `tensor` lies in. InvalidArgument says why its memory cannot be handed over.
Result<SharedBytes> shared_bytes(const at::Tensor& tensor);

}  // namespace tensorferry
