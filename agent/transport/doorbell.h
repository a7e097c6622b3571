/// A page of shared memory on which the threads of an agent's pool sleep. The agent's own threads wake them for jobs. A
/// peer on the host wakes them for a request that it has put into a ring.
///
/// A waker makes the system call only if a thread sleeps and no thread polls. This is sound because each side first
/// writes the words that the other side reads, and then reads the words that the other side writes, all sequentially
/// consistent:
///   waker:   publish the work;  then  read pollers, parked
///   sleeper: parked + 1, pollers - 1;  then  poll for work once more;  then  sleep while `sequence` is unchanged
/// tests/models/park.pml checks this, and shows that a sleeper without the second poll loses a wake-up.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "base/shared_memory.h"
#include "base/status.h"

namespace tensorferry {

/// Thread-safe. Only the agent's own threads may poll and sleep; any process that maps the page may wake them.
class Doorbell final {
 public:
  static constexpr std::size_t bytes = 4096;

  /// Creates the agent's own doorbell. It is in private memory if this process can share none: peers then use sockets.
  static std::shared_ptr<Doorbell> create();
  /// Maps a peer's doorbell by the descriptor that the peer sent. The page may hold any bytes, because this side only
  /// wakes by it. Fails as SharedMemory::map does.
  static Result<std::shared_ptr<Doorbell>> map(FileDescriptor fd);

  /// Wakes one sleeper if a thread sleeps and no thread polls. Publish the work before the call.
  void ring() {
    if (page_->pollers.load(std::memory_order_seq_cst) == 0 && page_->parked.load(std::memory_order_seq_cst) > 0)
      wake();
  }
  /// Wakes one sleeper, even if a thread polls.
  void wake();
  void wake_all();

  // ---- The agent's own threads
  /// Announces that this thread polls: wakers make no system call while it does, because it polls for work before it
  /// stops.
  void begin_polling() { page_->pollers.fetch_add(1, std::memory_order_seq_cst); }
  /// Announces that this thread stops polling. The thread must then poll the rings once more, and call wake() for work
  /// that it does not take itself.
  void end_polling() { page_->pollers.fetch_sub(1, std::memory_order_seq_cst); }
  [[nodiscard]] bool any_polling() const { return page_->pollers.load(std::memory_order_seq_cst) > 0; }
  [[nodiscard]] bool any_parked() const { return page_->parked.load(std::memory_order_seq_cst) > 0; }

  /// Ends polling. From park() to unpark(), wakers count this thread as asleep. The thread takes a ticket() first.
  void park() {
    page_->parked.fetch_add(1, std::memory_order_seq_cst);
    end_polling();
  }
  /// Sleeps until the doorbell has rung since `ticket`. Returns false if `limit` passes first.
  bool sleep(std::uint32_t ticket, std::optional<std::chrono::milliseconds> limit);
  /// Begins polling again.
  void unpark() {
    begin_polling();
    page_->parked.fetch_sub(1, std::memory_order_seq_cst);
  }

  /// Returns whether a waker has rung since `ticket`.
  [[nodiscard]] bool rung_since(std::uint32_t ticket) const {
    return page_->sequence.load(std::memory_order_seq_cst) != ticket;
  }
  /// Returns the present value of `sequence`.
  [[nodiscard]] std::uint32_t ticket() const { return page_->sequence.load(std::memory_order_seq_cst); }

  /// Returns false if this process cannot share memory.
  [[nodiscard]] bool shareable() const noexcept { return static_cast<bool>(memory_); }
  /// Returns a descriptor for a peer to map. Fails with ResourceExhausted if the system has no descriptor left. Fails
  /// with InvalidArgument if the page is not shareable(), or after close_descriptor().
  [[nodiscard]] Result<FileDescriptor> share() const;
  /// Closes the descriptor: from then on no peer can map the page. Peers that have mapped it keep it.
  void close_descriptor();

 private:
  struct Page {
    alignas(64) std::atomic<std::uint32_t> sequence;
    alignas(64) std::atomic<std::uint32_t> pollers;
    alignas(64) std::atomic<std::uint32_t> parked;
  };
  static_assert(sizeof(Page) <= bytes && std::atomic<std::uint32_t>::is_always_lock_free);

  explicit Doorbell(SharedMemory memory);

  mutable std::mutex descriptor_mutex_;
  SharedMemory memory_;
  std::unique_ptr<Page> own_;  // if memory_ is empty
  Page* page_;
};

}  // namespace tensorferry
