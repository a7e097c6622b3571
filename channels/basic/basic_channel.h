/// `basic`: bytes over the link's own streams. Reaches every peer; what is used where nothing faster fits.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

/// CPU memory to CPU memory. A buffer below `bulk_from` bytes follows the frame of its message and is read straight
/// into its destination. A larger one, or one whose message's stream cannot be appended to, goes on a connection that
/// carries bulk data alone, so that a small call never waits behind it.
///
/// `released` runs when the bytes are written: nothing waits for an acknowledgement. The wire holds every completion
/// that is pending, for only it knows when memory is touched no more.
class BasicDriver final : public Driver {
 public:
  /// The size from which the time to write the bytes would delay a small call behind them more than the use of a second
  /// connection costs.
  static constexpr std::size_t bulk_from = std::size_t{256} << 10;

  [[nodiscard]] std::string_view name() const override { return "basic"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  [[nodiscard]] bool immediate() const override { return true; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;
};

}  // namespace tensorferry
