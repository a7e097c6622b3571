/// The sender's side of a peer's inbox: writes small buffers into it, and knows which of its bytes are free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "base/mutex.h"
#include "channels/buffer.h"
#include "channels/rdma/free_ranges.h"
#include "channels/rdma/messages.h"
#include "channels/rdma/queue_pair.h"

namespace tensorferry::rdma {

/// Credits: each buffer holds its bytes of the inbox, and one of the receive requests that the peer has posted, until
/// the peer has acknowledged its ticket. So the peer's queues do not overrun. The acknowledgement is the credit that
/// comes back: no message is sent for it. If there is no credit, write() refuses at once, and the buffer goes another
/// way, so no buffer waits for another one's acknowledgement.
///
/// A withdrawn ticket gives its credit back at once, because no ticket names its bytes, and a later write by the same
/// queue pair comes later. Then the peer may get a write before it has posted a receive request for it; the cards let
/// such a write wait (RNR).
///
/// Thread-safe. Held by a shared_ptr.
class Outbox final : public std::enable_shared_from_this<Outbox> {
 public:
  Outbox(std::shared_ptr<QueuePair> pair, const OfferedInbox& theirs)
      : pair_(std::move(pair)), theirs_(theirs), free_(theirs.bytes) {}
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  /// A buffer in the peer's inbox.
  struct Written {
    std::uint64_t number = 0;  // of the write
    std::uint64_t offset = 0;  // in the inbox
    Owner credit;              // comes back when the last copy is dropped
  };
  /// Writes `bytes` bytes of registered memory into the inbox. `kept` keeps that memory until the card no longer reads
  /// it. nullopt: there is no credit, or the queue pair takes no write now.
  std::optional<Written> write(const std::byte* from, std::uint32_t local_key, std::size_t bytes, Owner kept);

 private:
  class Credit;
  void give_back(std::size_t offset, std::size_t bytes) noexcept;

  const std::shared_ptr<QueuePair> pair_;
  const OfferedInbox theirs_;

  Mutex mutex_;  // guards the members below
  FreeRanges free_;
  std::size_t open_ = 0;  // buffers that are not acknowledged
};

}  // namespace tensorferry::rdma
