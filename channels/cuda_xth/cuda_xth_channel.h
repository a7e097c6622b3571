/// `cuda_xth` (across threads): GPU memory to GPU memory of the same process, between any two GPUs and on one.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

/// One copy by the copy engine, on the receiver's stream, after what the sender's stream had been given when the buffer
/// was offered. Values are copied, also in a call to oneself.
///
/// As with `xth` a ticket names an offer by its channel end's id, 128 random bits which only the other end of the link
/// is told; no address travels.
///
/// `landed` runs when the copy is on the receiver's stream; `consumed`, and with it the source's release, when the copy
/// is done.
class CudaXthDriver final : public Driver {
 public:
  [[nodiscard]] std::string_view name() const override { return "cuda_xth"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  [[nodiscard]] bool immediate() const override { return true; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;
};

}  // namespace tensorferry
