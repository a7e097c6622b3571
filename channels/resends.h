/// Offers a buffer again elsewhere, after the channel that offered it has failed under it: the receiver asks, and the
/// sender sends the buffer as the link's bulk data.
///
/// The channels whose receiver fetches a buffer out of the sender's memory (cma, ibv) use it. Their senders keep each
/// source in `Offers` until the receiver acknowledges, so the source is still there when the receiver could not fetch
/// it. docs/protocol.md, "Sending a buffer again", is normative.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/record.h"
#include "channels/channel.h"
#include "channels/offers.h"

namespace tensorferry {

/// A control message of the channel: asks the sender for the buffer of `offer` as bulk data. The receiver counts
/// `sequence` up from 1.
struct Resend {
  static constexpr std::uint8_t tag = 3;
  std::uint64_t sequence = 0;
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
  static constexpr std::tuple fields{varint(&Resend::sequence), varint(&Resend::offer), varint(&Resend::bytes)};
};

/// Both sides of resending, for one channel end. The channel sends no other bulk data. Thread-safe.
class Resends final {
 public:
  /// `offers` are the open offers of this end.
  explicit Resends(std::shared_ptr<Offers> offers) : offers_(std::move(offers)) {}

  /// Receiver: asks the other end for a buffer. `memory` has its size. The wire runs both completions when the bytes
  /// have landed, or when the link ends. Ask once for an offer at most, and only if the channel no longer writes
  /// `memory`.
  void ask(Wire& wire, std::uint64_t offer, Buffer memory, Completion landed, Completion consumed);

  /// Sender: answers such a request. A request for a buffer that is not open, that has another size, or that was sent
  /// again before, gets no answer.
  void answer(Wire& wire, const Resend& resend);

 private:
  const std::shared_ptr<Offers> offers_;  // the wire's completions may outlive the channel
  std::atomic<std::uint64_t> asked_{0};
};

}  // namespace tensorferry
