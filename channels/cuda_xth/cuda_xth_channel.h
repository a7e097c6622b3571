/// The `cuda_xth` channel (across threads): copies GPU memory within one process, between any two GPUs and on one GPU.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

/// Makes one copy per buffer, on the receiver's stream, behind the work that the sender's stream had been given when
/// the buffer was offered. Copies the values even if a process calls itself.
///
/// As with `xth`, a ticket names an offer by the id of the channel end that offered it: 128 random bits, known only to
/// the other end of the link. No address travels.
///
/// `landed` runs when the copy is enqueued on the receiver's stream. `consumed`, and with it the source's release, runs
/// when the copy is done.
class CudaXthDriver final : public Driver {
 public:
  [[nodiscard]] std::string_view name() const override { return "cuda_xth"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  [[nodiscard]] bool immediate() const override { return true; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;
};

}  // namespace tensorferry
