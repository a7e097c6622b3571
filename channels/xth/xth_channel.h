/// `xth` (across threads): between two agents of one process, and for a call to oneself. Values are values here too:
/// one copy, but for regions (channels/region.h) that are handed over with Sharing::shared.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

/// CPU memory to CPU memory of the same process, known by a random number that each process draws for itself.
///
/// No address travels. A ticket names an offer of one channel end by that end's id, 128 random bits which only the
/// other end of its link is told, and a number; offers are found in a table of this process's channel ends. A peer that
/// claims to be this process therefore reaches nothing but what was offered to itself.
///
/// `released` runs when the other end acknowledged, or on withdraw or close; while the other end copies, after its
/// copy.
class XthDriver final : public Driver {
 public:
  [[nodiscard]] std::string_view name() const override { return "xth"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  [[nodiscard]] bool immediate() const override { return true; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;
};

}  // namespace tensorferry
