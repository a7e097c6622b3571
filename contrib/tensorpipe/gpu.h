/// The parts of the channel that differ for GPU memory. gpu_absent.cpp implements the same functions without CUDA, so
/// that no other file asks which build this is.
#pragma once

#include <tensorpipe/tensorpipe.h>

#include <memory>
#include <mutex>
#include <string>
#include <variant>

#include "base/status.h"
#include "channels/channel.h"

namespace tensorferry::tp::gpu {

/// Returns why this process has no GPUs; "" if it has.
std::string why_missing();

/// Registers TensorPipe's GPU channels with `context`; returns the channel that reaches all GPUs.
std::shared_ptr<tensorpipe::channel::Context> register_channels(tensorpipe::Context& context);

/// Returns the buffer to be offered, or a Refusal if TensorPipe cannot carry it. The bytes are valid after the work
/// that the stream has now. Unless that is done, `held` records an event there, because the stream may do any work by
/// the time the bytes are requested. The event is kept in `owner`, and stands in `stream`, so the result is for Sending
/// alone.
std::variant<Buffer, Refusal> held(const Buffer& buffer);

/// Owns the stream on which one channel sends. TensorPipe makes this stream wait for events of the peer, so that no
/// stream of the program waits for them.
class Sending final {
 public:
  Sending() = default;
  ~Sending();
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;

  /// Returns the source for TensorPipe, ordered after the event that `held` recorded.
  Result<tensorpipe::Buffer> buffer_of(const Buffer& held);
  /// Runs `then` when the work that TensorPipe has enqueued on the stream is done.
  void when_read(const Buffer& held, Completion then);

 private:
  std::mutex mutex_;
  void* stream_ = nullptr;
  int device_ = 0;
};

/// Returns a sink's memory for TensorPipe, in the order of its stream.
tensorpipe::Buffer buffer_of(const Buffer& memory);
/// Runs `then` when all work enqueued so far on the memory's stream is done.
void when_written(const Buffer& memory, Completion then);
/// Runs the completions of when_read and when_written whose work is done.
void progress();

}  // namespace tensorferry::tp::gpu
