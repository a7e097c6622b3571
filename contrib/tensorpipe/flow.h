/// Carries the bytes of buffers on a pipe, each when its receiver requests it.
#pragma once

#include <tensorpipe/tensorpipe.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "channels/channel.h"
#include "contrib/tensorpipe/gpu.h"

namespace tensorferry::tp {

/// One pipe of one device pair. A pipe delivers messages in the order in which they were written. So the sender writes
/// a buffer only when its receiver requests it: a buffer that is discarded, withdrawn or never pulled delays no other.
///
/// If TensorPipe holds memory, the completion runs when TensorPipe has finished with it, at the latest soon after
/// close(). Threads: any. Completions and `broke` run with no lock held.
class PipeFlow final : public std::enable_shared_from_this<PipeFlow> {
 public:
  using Pipe = std::shared_ptr<tensorpipe::Pipe>;

  /// `broke` runs once, if the pipe ends before close() ends it.
  PipeFlow(DevicePair pair, std::string peer, std::function<void(Status)> broke)
      : pair_(pair), peer_(std::move(peer)), broke_(std::move(broke)) {}

  /// Carries buffers on `pipe` from now on, first those given to send() before. If the flow has ended, closes `pipe`.
  void use(Pipe pipe);
  [[nodiscard]] bool ready() const;
  /// Returns why the flow has ended; Ok if it carries buffers, or will.
  [[nodiscard]] Status end() const;

  /// Writes the bytes of an offer. `done` runs when its source is no longer read.
  void send(std::uint64_t offer, Buffer source, Completion done);
  /// Awaits the bytes of an offer of the peer. Returns false, and takes nothing, if they are awaited already. If the
  /// flow has ended, runs both completions with its status and returns true.
  bool receive(std::uint64_t offer, Buffer& memory, Completion& landed, Completion& consumed);

  /// Ends a pipe that has failed, and runs `broke`.
  void fail(Status status);
  void close(Status status);

 private:
  struct Incoming {
    Buffer memory;
    Completion landed, consumed;
  };
  struct Outgoing {
    std::uint64_t offer;
    Buffer source;
    Completion done;
  };

  void write(const Pipe& pipe, Outgoing outgoing);
  void sent(Outgoing& outgoing, const tensorpipe::Error& error);
  void read_next(const Pipe& pipe);
  void read(const Pipe& pipe, const tensorpipe::Descriptor& descriptor);
  void landed(Incoming& incoming, const tensorpipe::Error& error);
  /// Takes the buffer that `descriptor` announces out of the awaited ones; returns nullopt if `descriptor` breaks the
  /// protocol.
  std::optional<Incoming> take(const tensorpipe::Descriptor& descriptor);
  /// Ends the pipe; returns false if it had ended before.
  bool end(Status status);
  [[nodiscard]] Status status_of(const tensorpipe::Error& error) const;

  const DevicePair pair_;
  const std::string peer_;
  const std::function<void(Status)> broke_;
  gpu::Sending sending_;

  mutable std::mutex mutex_;
  Status end_;
  Pipe pipe_;
  std::vector<Outgoing> unsent_;  // given to send() before there was a pipe
  std::map<std::uint64_t, Incoming> awaited_;
};

}  // namespace tensorferry::tp
