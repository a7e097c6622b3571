/// Hands regions over to one peer without a copy, and tracks which regions the peer knows.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <variant>

#include "base/mutex.h"
#include "channels/channel.h"
#include "channels/region.h"
#include "channels/shm/layout.h"

namespace tensorferry::shm {

/// The regions that one channel end has handed over.
///
/// The first hand-over of a region sends its descriptor to the peer; later ones need a ticket alone. When the region
/// has ended, this object tells the peer how many tickets were sent. A ticket may travel by a ring and so arrive after
/// that message; the peer therefore drops the region when the last ticket has come.
///
/// Thread-safe. The object uses the wire under its lock, and not after close().
class Handovers final : public RegionUser, public std::enable_shared_from_this<Handovers> {
 public:
  explicit Handovers(Wire& wire) : wire_(wire) {}

  /// Counts one more ticket of the region, and sends the region's descriptor if the peer does not have it. Returns the
  /// number of that control message, which must arrive before the ticket; or the reason why there is no ticket.
  std::variant<ControlId, Refusal> hand(const std::shared_ptr<Region>& region);
  /// Takes back the count of a ticket that was not sent.
  void withdrawn(std::uint64_t region);
  /// Handles a region that the peer could not map: the next hand() sends the descriptor again.
  void missed(std::uint64_t region);
  /// Tells the peer that the region has ended. Runs on the thread that dropped it, with no lock held.
  void gone(std::uint64_t region) noexcept override;
  void close() noexcept;

 private:
  struct Known {
    ControlId told = 0;         // the message that carried the descriptor; 0: the next hand() sends it
    std::uint64_t tickets = 0;  // how many were sent
  };

  Wire& wire_;
  Mutex mutex_;
  bool closed_ = false;
  std::map<std::uint64_t, Known> regions_;
};

}  // namespace tensorferry::shm
