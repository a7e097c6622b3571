/// What travels on a pipe: the bytes of buffers, each asked for by its receiver.
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
#include "channels/tensorpipe/gpu.h"

namespace tensorferry::tp {

/// One pipe of one device pair. A pipe hands messages over in the order in which they were written, so a buffer is
/// written when its receiver asks for it: what is discarded, withdrawn or never pulled is never in anybody's way.
///
/// Memory that TensorPipe has completes when TensorPipe has done with it, at the latest soon after close().
/// Threads: any; completions and `broke` run with no lock held.
class Flow final : public std::enable_shared_from_this<Flow> {
 public:
  using Pipe = std::shared_ptr<tensorpipe::Pipe>;

  /// `broke` runs once, where the pipe ends before close() does it.
  Flow(DevicePair pair, std::string peer, std::function<void(Status)> broke)
      : pair_(pair), peer_(std::move(peer)), broke_(std::move(broke)) {}

  /// Carries from now on, what was given to send() before as well.
  void use(Pipe pipe);
  [[nodiscard]] bool ready() const;
  /// Why it carries no more; ok: it does, or will.
  [[nodiscard]] Status end() const;

  /// Writes the bytes of an offer. `done`: its source is read no more.
  void send(std::uint64_t offer, Buffer source, Completion done);
  /// Awaits the bytes of an offer of the peer's. False: they are awaited already; then nothing is taken.
  bool receive(std::uint64_t offer, Buffer& memory, Completion& landed, Completion& consumed);

  /// The pipe is of no use: ends it, and tells `broke`.
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
  /// Takes what `descriptor` announces out of those awaited; nothing where it breaks the rules.
  std::optional<Incoming> take(const tensorpipe::Descriptor& descriptor);
  /// False: it had ended before.
  bool end(Status status);
  [[nodiscard]] Status status_of(const tensorpipe::Error& error) const;

  const DevicePair pair_;
  const std::string peer_;
  const std::function<void(Status)> broke_;
  gpu::Sending sending_;

  mutable std::mutex mutex_;
  Status end_;
  Pipe pipe_;
  std::vector<Outgoing> unsent_;  // asked for before there was a pipe
  std::map<std::uint64_t, Incoming> awaited_;
};

}  // namespace tensorferry::tp
