/// GPU tensors: sent from where they lie, in the order of the stream that is current when they are sent; received into
/// memory of torch's caching allocator, which lands on a stream of its own.
#pragma once

#include <memory>

#include "converters/registry.h"

namespace tensorferry {

/// Null where this build has no CUDA parts. Nothing is asked of a GPU, and no context made, before the first tensor.
///
/// to_buffer: the buffer's stream is the current one of the storage's device. InvalidArgument: a CUDA graph is being
/// captured on it, so what is sent would be read when the graph is replayed, and not now.
///
/// to_storage: the storage is torch's own (its allocator, resizable; record_stream works on it). The current stream
/// waits for the buffer's, on the GPU, where the bytes are not there yet, and the memory is used again only when what
/// the current stream has been given by the time of its release is done. InvalidArgument: a CUDA graph is being
/// captured on it. A buffer that memory() gave can be made a storage once.
///
/// memory(): a buffer's stream is one of a few that only received buffers use, an idle one where there is one.
/// Allocates in a pool of its own, so that a received block never waits for what the program computes. Null where the
/// GPU has no more, and for devices that are not there.
///
/// Nothing here waits for a GPU.
std::shared_ptr<Converter> make_cuda_converter(bool (*leaves_storages)() = nullptr);

}  // namespace tensorferry
