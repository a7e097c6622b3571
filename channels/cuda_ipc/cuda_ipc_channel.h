/// The `cuda_ipc` channel: carries GPU memory between two processes on one host. The receiver's copy engine reads the
/// sender's tensor directly.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

namespace cuda_ipc {
struct CudaIpcOptions {
  /// For tests: allows both ends in one process. The channel then refuses cudaMalloc's memory.
  bool within_process = false;
  /// How a receiver waits for a sender's stream that is busy. `automatic`: on the host if the environment leaves this
  /// process few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), because a stream that waits holds up its queue; else by
  /// the stream, so that calls need not wait for kernels.
  enum class Wait : std::uint8_t { automatic, by_stream, on_host } wait = Wait::automatic;
};
}  // namespace cuda_ipc

/// Makes one copy per buffer, device to device, on the receiver's stream, straight from the sender's memory. Works on
/// one GPU and between GPUs with peer access; the two processes may give a GPU different indices.
///
/// Memory: cudaMalloc's memory is exported by IPC handle; physical chunks of virtual memory (torch's expandable
/// segments) are exported one by one, by file descriptor. When the first buffer in an allocation is offered, the peer
/// maps the allocation in the background, and other channels carry meanwhile. If memory cannot be exported, the channel
/// refuses the buffer with the reason.
///
/// Order: a ticket names the place of the bytes. If the sender's stream was busy, the ticket also names a stream word,
/// which the sender's stream writes and the receiver waits for (CudaIpcOptions::wait). If the link ends meanwhile, a
/// receiver that waits on the host fails the pull. One whose stream waits writes the word itself: the stream continues,
/// with the bytes that the memory then holds, and users see the end of the link as the error.
///
/// If the GPU has no memory for the probe, the pair fails for the time being, and the probe is tried again.
///
/// Completions: `landed` runs when the copy is enqueued on the receiver's stream. `consumed`, which releases the
/// sender's memory, runs when the copy is done.
class CudaIpcDriver final : public Driver {
 public:
  explicit CudaIpcDriver(cuda_ipc::CudaIpcOptions options = {}) : options_(options) {}
  [[nodiscard]] std::string_view name() const override { return "cuda_ipc"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  [[nodiscard]] bool shares_memory() const override { return true; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;

 private:
  const cuda_ipc::CudaIpcOptions options_;
};

}  // namespace tensorferry
