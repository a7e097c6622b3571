/// `cuda_ipc`: GPU memory of two processes on one host: the receiver's copy engine reads the sender's tensor itself.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

namespace cuda_ipc {
struct Options {
  /// For tests: both ends may be in one process. Memory of cudaMalloc's is refused then.
  bool within_process = false;
};
}  // namespace cuda_ipc

/// One copy, device to device, on the receiver's stream, straight from the sender's memory; between GPUs that reach
/// each other, whatever number each process gives them, and on one GPU.
///
/// Memory is exported by cudaMalloc's handles, or chunk by chunk by descriptors (torch's expandable segments), and
/// mapped by the peer in the background when the first buffer in it is offered; other channels carry meanwhile. What
/// cannot be exported is refused with the reason.
///
/// A ticket tells where the bytes are and, where the sender's stream was still busy, which stream word they come
/// behind: the sender's stream writes it, the receiver's waits for it. When the sender dies the receiver writes the
/// word itself: its streams go on, with whatever the memory holds, and the link's end is what users hear of.
///
/// `landed` runs when the copy is on the receiver's stream; `consumed`, which releases the sender's memory, when the
/// copy is done.
class CudaIpcDriver final : public Driver {
 public:
  explicit CudaIpcDriver(cuda_ipc::Options options = {}) : options_(options) {}
  [[nodiscard]] std::string_view name() const override { return "cuda_ipc"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  [[nodiscard]] bool shares_memory() const override { return true; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;

 private:
  const cuda_ipc::Options options_;
};

}  // namespace tensorferry
