/// The `ibv` channel: the receiver's network card reads a buffer out of the sender's memory (RDMA over libibverbs).
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"
#include "channels/rdma/options.h"

namespace tensorferry {

namespace rdma {
class SharedCards;
}  // namespace rdma

namespace ibv {

struct IbvOptions {
  std::size_t least_bytes = std::size_t{16} << 10;    // smaller buffers are refused, unless ibv is the last resort
  std::size_t copied_bytes = std::size_t{64} << 10;   // up to here a copy costs less than a registration
  std::size_t staging_bytes = std::size_t{32} << 20;  // of the registered memory through which buffers are copied
  std::optional<rdma::Options> rdma = std::nullopt;   // nullopt: those of the environment
};

}  // namespace ibv

/// Carries CPU memory to CPU memory of any process that a card reaches: InfiniBand, or RoCE. libibverbs is loaded at
/// run time. If it is missing, or there is no card, no active port, or no right to open the card, there is no
/// descriptor, and the Refusal says so.
///
/// Probe: the two ends connect queue pairs by control messages, and each reads a word that it has asked the peer to
/// write (rdma::PeerConnection). So ports that only look as if they reached each other fail the probe.
///
/// Sources, in this order:
/// 1. Memory that stays registered: regions, and memory that the program registered ahead (rdma::Registrations).
/// 2. A copy in the driver's staging memory: small buffers, bundles, and the first use of memory of kind 1, which is
///    registered in the background meanwhile. The source is released inside `offer`.
/// 3. Other memory is registered for the time of the offer.
/// 4. If it cannot be registered (`ulimit -l`, TENSORFERRY_RDMA_PINNED), a copy as in 2, if it fits. Otherwise the
///    channel refuses the buffer and says why.
///
/// Destinations: blocks of the receive pool stay registered. Other memory is registered for the time of the pull, or
/// the bytes go through staging memory piece by piece.
///
/// Failure: if a queue pair fails under a buffer (the port went down, the card of the peer does not answer, a key is
/// not valid any more), the receiver asks for the buffer as the link's bulk data (Resends). The sender keeps the
/// source, or its copy of it, until the acknowledgement. The queue pairs of other ports carry on. If there are none,
/// the pair is not usable (Wire::ready) until a queue pair is connected again.
///
/// Release: `released` runs when the receiver has acknowledged, or on withdraw or close, after the memory was
/// deregistered if the registration was for this offer alone. close() first stops the queue pairs, so that the peer
/// reads no source that has been released.
///
/// Threads: reads complete on the driver's thread of completions, or on a thread that calls progress(); the latter
/// spares the wake-ups of both while a thread waits for a reply. A forked child cannot use the driver or its channels.
class IbvDriver final : public Driver {
 public:
  /// `cards`: those that the agent's drivers share, made with the options that count then instead of `options.rdma` and
  /// `options.staging_bytes`; null: the driver has its own.
  explicit IbvDriver(ibv::IbvOptions options = {}, std::shared_ptr<rdma::SharedCards> cards = nullptr);
  ~IbvDriver() override;

  [[nodiscard]] std::string_view name() const override { return "ibv"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  [[nodiscard]] bool carries_staged() const override { return true; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tensorferry
