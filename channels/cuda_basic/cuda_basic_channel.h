/// The `cuda_basic` channel: carries GPU memory through the host, between any two processes, to GPU or CPU memory.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

namespace cuda_basic {

struct CudaBasicOptions {
  std::chrono::milliseconds ring_idle{10'000};  // a ring that carries nothing for so long is given back
};

}  // namespace cuda_basic

/// Copies a buffer in chunks, several in flight: device to host, over the link, host to device. At an end with CPU
/// memory, the host copies instead of a GPU.
///
/// On one host the chunks go through a ring of page-locked memory that both processes map, one ring per direction. The
/// sender's GPU writes the ring and the receiver's GPU reads it, on streams of the channel. The hosts report progress
/// to each other by words in the ring. The first offered buffer that no faster channel will soon carry starts the
/// creation of the ring in the background. A ring that is idle is given back; the next buffer makes another one.
/// Without a ring the chunks are bulk data of the link: until the peer has mapped one, if the link passes no
/// descriptors, if an agent shares no memory, or if a process has as much page-locked memory as it may have. A GPU
/// copies those through page-locked slots, which all links of the process share. If a channel of the link carries
/// staged bytes (Wire::carrier: `ibv`, between hosts with network cards), it takes the chunks of larger buffers from
/// slot to slot instead, and if it fails, the rest goes as bulk data.
///
/// The sender starts at `offer`, without a request from the receiver. The chunks of all buffers of a direction follow
/// each other, so the receiver drops the bytes of buffers that it does not pull. The source is released when it has
/// been read; only carried chunks are acknowledged, one by one. A buffer whose stream is busy, at either end, holds up
/// no other: the sender's chunks have no place among the others before its stream has come so far (messages.h,
/// Announced), and the receiver's bytes wait in host memory (detour.h). `landed` runs when the bytes are usable in the
/// order of the receiver's stream: by ring, when the copy of the last chunk is enqueued; without a ring or after a wait
/// in host memory, when that copy is done.
class CudaBasicDriver final : public Driver {
 public:
  explicit CudaBasicDriver(cuda_basic::CudaBasicOptions options = {}) : options_(options) {}
  [[nodiscard]] std::string_view name() const override { return "cuda_basic"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  [[nodiscard]] bool immediate() const override { return true; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;

 private:
  const cuda_basic::CudaBasicOptions options_;
};

}  // namespace tensorferry
