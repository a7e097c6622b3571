/// Marks memory of GPUs that operations of groups read in place.
#pragma once

#include <cstddef>

namespace tensorferry::collectives::cuda {

/// Marks `bytes` bytes of the memory of GPU `device` at `data`: if each rank of a group has a GPU, the other ranks map
/// the allocation at the first operation that reads an input there (lent_memory.h), and the input is not copied to the
/// group's buffer. The mark ends when the allocator reports that the memory goes (channels/cuda/invalidate.h).
/// Thread-safe. A build without CUDA ignores it.
void mark_symmetric(int device, const std::byte* data, std::size_t bytes);

}  // namespace tensorferry::collectives::cuda
