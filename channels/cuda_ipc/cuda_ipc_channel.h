/// The `cuda_ipc` channel: carries GPU memory between two processes on one host. The receiver's copy engine reads the
/// sender's tensor directly.
#pragma once

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
/// which the sender's stream writes and the receiver's stream waits for. When the link ends, the receiver writes the
/// words itself: its streams continue, with the bytes that the memory then holds, and users see the end of the link as
/// the error.
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
