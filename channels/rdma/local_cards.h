/// What the drivers of one agent have of this host's cards: open cards, their ports, registered memory, and threads.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/background.h"
#include "base/status.h"
#include "channels/rdma/cards.h"
#include "channels/rdma/completion_thread.h"
#include "channels/rdma/messages.h"
#include "channels/rdma/open_card.h"
#include "channels/rdma/options.h"
#include "channels/rdma/registrations.h"
#include "channels/rdma/staging_area.h"

namespace tensorferry::rdma {

/// Thread-safe. The queue pairs and fetches of the driver's channels share it.
struct LocalCards final {
  /// A port with the card that it is on. The index of a port is its place in `ports`.
  struct PortOfCard {
    CardPort port;
    std::size_t card = 0;
  };

  /// Opens the cards of `ports`. ChannelUnavailable if one cannot be opened.
  static Result<std::shared_ptr<LocalCards>> open(const std::vector<CardPort>& ports, const Options& options,
                                                  std::size_t staging_bytes);
  ~LocalCards();

  /// Ends the thread of completions: destroys the queue pairs and completes their work with an error. SharedCards calls
  /// it when all channels are closed.
  void end() { completions->end(); }

  /// Returns the cards of these ports, each once.
  [[nodiscard]] std::vector<std::size_t> cards_of(const std::vector<std::size_t>& port_indices) const;

  Options options;
  std::vector<std::shared_ptr<OpenCard>> cards;
  std::vector<PortOfCard> ports;
  std::shared_ptr<PinnedBudget> budget;
  std::shared_ptr<Registrations> registrations;
  std::shared_ptr<StagingArea> staging;
  std::shared_ptr<CompletionThread> completions;

 private:
  LocalCards() = default;
};

/// Returns what a peer has to know of a port.
PortAddress address_of(const CardPort& port);
/// Returns whether two ports can reach each other, as far as their addresses tell: InfiniBand ports of one subnet, or
/// RoCE ports of the same version and address family that are both routable or both link-local. The probe tells the
/// rest. Symmetric.
bool can_reach(const PortAddress& one, const PortAddress& other);

/// Returns the descriptor of an agent with these ports.
Bytes descriptor_of(const std::vector<CardPort>& ports);
/// Returns nullopt if a port of one descriptor can reach a port of the other, else the reason (Driver::reaches).
std::optional<Refusal> reaches(ByteView mine, ByteView theirs);

/// Pairs the ports of two ends, each once: the first of `one` with the first of `other` that it can reach, and so on.
/// Returns indices into the two lists. Both ends agree on which list comes first.
std::vector<std::pair<std::size_t, std::size_t>> pair_ports(const std::vector<PortAddress>& one,
                                                            const std::vector<PortAddress>& other);

}  // namespace tensorferry::rdma
