/// Registered memory of this process into which one queue pair of a peer writes small buffers, and the pulls that wait
/// for such buffers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/function.h"
#include "base/mutex.h"
#include "base/status.h"
#include "channels/rdma/registrations.h"

namespace tensorferry::rdma {

/// The peer decides where in the inbox each buffer lies (Outbox). It numbers its writes from 1. The queue pair delivers
/// them in order, so an inbox is told one number: that of the last write that has arrived.
///
/// What a hostile peer can do: it can write these bytes at any time, and name any of them in a ticket. So it can spoil
/// buffers of its own, and no others. A buffer is copied out once, and no decision here rests on the inbox's bytes.
///
/// Thread-safe. Held by the queue pair (QueuePair::receive_into).
class Inbox final {
 public:
  /// Makes an inbox of `bytes` bytes, which are registered with `card` for the writes of peers. Fails as
  /// Registrations::make does.
  static Result<std::shared_ptr<Inbox>> make(Registrations& registrations, std::size_t card, std::size_t bytes);
  ~Inbox();
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;

  [[nodiscard]] std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(base_); }
  [[nodiscard]] std::uint32_t key() const { return key_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

  /// Gets the bytes of a write, valid until it returns; or an error, and null: they will never come.
  using Taker = UniqueFunction<void(const Status&, const std::byte*)>;
  /// Calls `taker` when the write with this number has arrived: inside the call, or on the thread that calls arrived()
  /// or fail(). `offset` lies within the inbox.
  void take(std::uint64_t number, std::uint64_t offset, Taker taker);
  /// The writes up to this number have arrived. Numbers may come out of order.
  void arrived(std::uint64_t number);
  /// No write arrives any more: ends the waiting takes with `why`, and later ones whose write has not arrived.
  void fail(const Status& why);
  /// Returns whether a take waits.
  [[nodiscard]] bool awaited() const noexcept { return awaited_.load(std::memory_order_relaxed); }

 private:
  struct Waiting {
    std::uint64_t offset = 0;
    Taker taker;
  };

  Inbox(std::byte* base, std::size_t bytes) : base_(base), bytes_(bytes) {}

  std::byte* const base_;
  const std::size_t bytes_;
  const std::uint32_t born_in_ = forks();
  std::uint32_t key_ = 0;
  std::shared_ptr<Registration> registration_;
  std::atomic<bool> awaited_{false};

  Mutex mutex_;  // guards the members below
  std::uint64_t arrived_ = 0;
  Status failure_;
  std::multimap<std::uint64_t, Waiting> waiting_;  // by number
};

}  // namespace tensorferry::rdma
