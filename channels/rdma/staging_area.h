/// Registered memory through which buffers go whose own memory is not registered: small ones, for which a copy costs
/// less than a registration, and those that cannot be registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.h"
#include "base/mutex.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "channels/rdma/free_ranges.h"
#include "channels/rdma/registrations.h"

namespace tensorferry::rdma {

/// A ring of pieces of any size, for all channels of one driver. It takes its memory at the first use, and registers it
/// with the cards that a piece is for. If the system lets it pin less than it wants, it has less. Thread-safe. Held by
/// a shared_ptr.
class StagingArea final : public std::enable_shared_from_this<StagingArea> {
 public:
  StagingArea(std::shared_ptr<Registrations> registrations, std::size_t bytes)
      : registrations_(std::move(registrations)), wanted_(bytes) {}
  ~StagingArea();
  StagingArea(const StagingArea&) = delete;
  StagingArea& operator=(const StagingArea&) = delete;

  struct Piece {
    std::byte* data = nullptr;
    std::shared_ptr<Registration> registration;
    Owner owner;  // gives the piece back when its last copy is dropped
  };
  /// Returns a piece of `bytes` bytes that is registered with all of `cards`. Never waits for one to come back; the
  /// first call for a card blocks while the area is registered. Fails with ResourceExhausted if too little is free, or
  /// if no memory may be pinned; the text says which.
  Result<Piece> take(std::size_t bytes, const std::vector<std::size_t>& cards);

  /// Returns the bytes of pieces that are held.
  [[nodiscard]] std::size_t used() const;

 private:
  class Held;

  Status prepare(const std::vector<std::size_t>& cards);
  void give_back(std::size_t offset, std::size_t bytes) noexcept;

  static constexpr std::size_t least = std::size_t{64} << 10;  // an area below that is of no use

  const std::shared_ptr<Registrations> registrations_;
  const std::size_t wanted_;
  const std::uint32_t born_in_ = forks();

  mutable Mutex mutex_;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t used_ = 0;
  FreeRanges free_{0};
  std::shared_ptr<Registration> registration_;
  Status failed_;  // why there is no area
};

}  // namespace tensorferry::rdma
