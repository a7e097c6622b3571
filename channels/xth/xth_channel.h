/// `xth` (across threads): carries buffers between two agents of one process, and for an agent's calls to itself. Each
/// buffer is copied once, except regions (channels/region.h) that are handed over with Sharing::shared.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

/// Carries CPU memory to CPU memory of the same process. Two agents know that they share a process by a random number
/// that each process draws for itself.
///
/// No address travels. A ticket names an offer by the id of a channel end and the offer's number there. The id is 128
/// random bits, which only the other end of the link is told. The receiver finds the offer in a table of this process's
/// channel ends. So a peer that falsely claims to be this process reaches only buffers that were offered to itself.
///
/// `released` runs when the other end acknowledges, or on withdraw or close. If the other end is copying then,
/// `released` runs after the copy.
class XthDriver final : public Driver {
 public:
  [[nodiscard]] std::string_view name() const override { return "xth"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  [[nodiscard]] bool immediate() const override { return true; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;
};

}  // namespace tensorferry
