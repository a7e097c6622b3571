/// Tensors in memory that operations of groups on GPUs read in place.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/status.h"

namespace tensorferry::collectives {

/// Marks the tensor's memory, which stays torch's: if each rank of a group has a GPU, the other ranks map it at the
/// first operation whose input lies there, and the input is not copied to the group's buffer (cuda/symmetric_memory.h).
/// The mark stays with the memory until torch's allocator gives it back to the driver, so later tensors there have it
/// too. InvalidArgument: the tensor is not dense memory of a CUDA device.
Status mark_symmetric(const at::Tensor& tensor);

}  // namespace tensorferry::collectives
