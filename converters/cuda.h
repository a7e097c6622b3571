/// The converter for GPU tensors. Sends from a tensor's own memory, in the order of the stream that is current at the
/// time. Receives into memory of torch's caching allocator, on streams that only received buffers use.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>

#include "base/status.h"
#include "converters/registry.h"

namespace tensorferry {

/// Makes the converter; returns null if this build has no CUDA parts. The converter queries no GPU and creates no
/// context before the first tensor. None of its functions waits for a GPU. A failed CUDA call is an Internal error.
///
/// to_buffer: the buffer's stream is the current stream of the storage's device. InvalidArgument: a CUDA graph is being
/// captured on that stream, so the bytes would exist only when the graph is replayed.
///
/// to_storage: the storage is torch's own (torch's allocator, resizable; record_stream works on it). If the bytes have
/// not arrived yet, the current stream waits for the buffer's stream, on the GPU. The allocator reuses the memory only
/// after the work that the current stream had been given when the memory was released. A buffer of memory() can become
/// a storage once. InvalidArgument: a CUDA graph is being captured on the current stream, or the process has no such
/// GPU.
///
/// memory(): a buffer's stream is one of up to 16 streams per GPU that only received buffers use, preferably an idle
/// one. The block is allocated for that stream, so it never waits for the program's own work. The buffer's data is null
/// if the GPU has no memory left, or if the process has no such GPU.
///
/// `leaves_storages` is called before a sent storage is released. If it returns true, the storage is leaked instead.
std::shared_ptr<Converter> make_cuda_converter(bool (*leaves_storages)() = nullptr);

/// Returns the number of GPUs of this process. Creates no context. 0 if this build has no CUDA parts.
int gpu_count();

/// Makes torch's allocator report the memory that it gives back to the driver (channels/cuda/invalidate.h), from the
/// first call on. The converter does so at its first use. Does nothing if this build has no CUDA parts.
void report_released_memory();

/// Returns Ok if work that is given to `stream` now runs now; InvalidArgument if a CUDA graph is being captured on it.
/// Ok for streams of other devices, and if this build has no CUDA parts.
Status refusal_of_capture(const c10::Stream& stream);
/// Returns whether the device has come to `event`. Other threads may be capturing graphs.
bool has_happened(const c10::Event& event);
/// Returns the CUstream of a stream of a GPU; null if this build has no CUDA parts. Null is also the default stream.
void* native_handle(const c10::Stream& stream);

}  // namespace tensorferry
