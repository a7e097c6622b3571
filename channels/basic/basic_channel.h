/// `basic`: sends bytes over the link's own streams. Reaches every peer; an agent uses it if no faster channel fits.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

/// Carries CPU memory to CPU memory. A buffer below `bulk_from` bytes follows the frame of its message, and the
/// receiver reads it straight into its destination. So does a buffer that describes the others of its message
/// (`Outgoing::leads`), even if it is larger. Larger buffers go on a connection that carries bulk data alone, so that a
/// small call never waits behind them, and in pieces if the connections go over several networks
/// (`Wire::splits_bulk`). If a message's stream cannot be appended to, its buffers go there too.
///
/// `released` runs when the bytes are written; the channel waits for no acknowledgement. The wire holds every pending
/// completion, because only the wire knows when memory is no longer touched.
class BasicDriver final : public Driver {
 public:
  /// The size from which writing the bytes would delay a small call behind them by more than the use of a second
  /// connection costs.
  static constexpr std::size_t bulk_from = std::size_t{256} << 10;
  /// If the wire splits bulk data, a buffer from this size goes in pieces of `piece_bytes`, or of more bytes if they
  /// would be more than `most_pieces`. Smaller pieces would load the networks more evenly at the end of a buffer, and
  /// cost more system calls.
  static constexpr std::size_t pieces_from = std::size_t{8} << 20;
  static constexpr std::size_t piece_bytes = std::size_t{4} << 20;
  static constexpr std::size_t most_pieces = 1024;

  [[nodiscard]] std::string_view name() const override { return "basic"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  [[nodiscard]] bool immediate() const override { return true; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;
};

}  // namespace tensorferry
