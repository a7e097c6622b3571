/// A queue pair of a card that is connected to itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "channels/rdma/local_cards.h"
#include "channels/rdma/queue_pair.h"
#include "channels/rdma/registrations.h"

namespace tensorferry::rdma {

/// Reads a byte of this process's own memory by a card. On the PCI bus a read comes behind the writes before it. So
/// when it is done, everything that the card has written there is visible. Thread-safe. Held by a shared_ptr.
class Loopback final {
 public:
  /// Makes and connects the queue pair on a port (an index in LocalCards::ports). `cards` outlives the result.
  static Result<std::shared_ptr<Loopback>> make(LocalCards& cards, std::size_t port);
  ~Loopback();
  Loopback(const Loopback&) = delete;
  Loopback& operator=(const Loopback&) = delete;

  /// Reads the byte at `address`, which peers may read by `remote_key`. `done` runs on the thread of completions, or
  /// inside the call if the queue pair has failed.
  void read(std::uint64_t address, std::uint32_t remote_key, Completion done);
  [[nodiscard]] bool failed() const noexcept { return pair_->failed(); }

 private:
  struct alignas(64) Landing {
    std::byte byte{};
  };
  Loopback(LocalCards& cards, std::size_t card) : cards_(cards), card_(card) {}

  LocalCards& cards_;
  const std::size_t card_;
  const std::uint32_t born_in_ = forks();
  const std::shared_ptr<Landing> landing_ = std::make_shared<Landing>();
  std::shared_ptr<Registration> registration_;
  std::shared_ptr<QueuePair> pair_;
};

}  // namespace tensorferry::rdma
