/// The sender's end of memory that is shared without a copy: which regions one peer knows of.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <variant>

#include "channels/channel.h"
#include "channels/region.h"
#include "channels/shm/layout.h"

namespace tensorferry::shm {

/// A region's descriptor goes to the peer with the first hand-over; later ones are tickets alone. When the region has
/// ended the peer is told how many tickets there were: those may travel by another way than this message (a ring), so
/// the peer forgets the region when the last has come.
///
/// Thread-safe. The wire is used under the lock, and not after close().
class Handovers final : public RegionUser, public std::enable_shared_from_this<Handovers> {
 public:
  explicit Handovers(Wire& wire) : wire_(wire) {}

  /// The control message that tells of the region, which is to come before the ticket; or why there is no ticket.
  std::variant<ControlId, Refusal> hand(const std::shared_ptr<Region>& region);
  /// A ticket was not sent.
  void withdrawn(std::uint64_t region);
  /// The peer could not map it: it is told of it again with the next ticket.
  void missed(std::uint64_t region);
  void gone(std::uint64_t region) noexcept override;
  void close() noexcept;

 private:
  struct Known {
    ControlId told = 0;         // 0: the peer has to be told
    std::uint64_t tickets = 0;  // sent
  };

  Wire& wire_;
  std::mutex mutex_;
  bool closed_ = false;
  std::map<std::uint64_t, Known> regions_;
};

}  // namespace tensorferry::shm
