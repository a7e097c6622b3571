/// `cuda_basic`: GPU memory by way of the host, between any two processes, and between GPU memory and the CPU's.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

/// D2H in chunks, the link, H2D in chunks, many in flight; at the ends whose memory is the CPU's a copy by the host
/// takes the GPU's place.
///
/// On one host the chunks go through a ring of page-locked memory that both processes map, one for each direction: one
/// GPU writes and the other reads it on streams of the channel's, and the hosts tell each other how far they are by
/// words in it. A ring is made in the background when the first buffer is offered; until then, and where the link
/// passes no descriptors, chunks are bulk data of the link's (which is the pair's CPU channel then), through
/// page-locked slots at the ends.
///
/// The bytes are on their way when `offer` returns, and one buffer's stand behind another's: the receiver lets pass
/// what it does not pull. The source is released when it has been read, unasked. `landed` runs when the last chunk is
/// on its way to the receiver's memory, in the order of that memory's stream.
class CudaBasicDriver final : public Driver {
 public:
  [[nodiscard]] std::string_view name() const override { return "cuda_basic"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  [[nodiscard]] bool immediate() const override { return true; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;
};

}  // namespace tensorferry
