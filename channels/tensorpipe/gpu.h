/// What differs where the memory is a GPU's. gpu_absent.cpp is the same without CUDA, so that nobody else asks which
/// build this is.
#pragma once

#include <tensorpipe/tensorpipe.h>

#include <memory>
#include <mutex>
#include <string>
#include <variant>

#include "channels/channel.h"
#include "channels/status.h"

namespace tensorferry::tp::gpu {

/// "": this process has GPUs.
std::string why_missing();

/// Gives TensorPipe's channels for GPUs to `context`; returns the one that reaches all of them.
std::shared_ptr<tensorpipe::channel::Context> register_channels(tensorpipe::Context& context);

/// The buffer as it is to be offered: what it is valid after is found out now, and kept in its stream and owner, since
/// the stream may be at anything when the bytes are asked for. For Sending alone.
std::variant<Buffer, Refusal> held(const Buffer& buffer);

/// The stream of a channel's own on which it sends, so that what TensorPipe makes it wait for (events of the peer's)
/// holds up nothing of the program's.
class Sending final {
 public:
  Sending() = default;
  ~Sending();
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;

  /// For TensorPipe, behind what `held` found.
  Result<tensorpipe::Buffer> buffer_of(const Buffer& held);
  /// Runs `then` when what TensorPipe has put on the stream is done.
  void when_read(const Buffer& held, Completion then);

 private:
  std::mutex mutex_;
  void* stream_ = nullptr;
  int device_ = 0;
};

/// A sink's memory for TensorPipe, in the order of its stream.
tensorpipe::Buffer buffer_of(const Buffer& memory);
/// Runs `then` when all that the memory's stream has been given is done.
void when_written(const Buffer& memory, Completion then);
/// Runs those of both whose time has come.
void settle();

}  // namespace tensorferry::tp::gpu
