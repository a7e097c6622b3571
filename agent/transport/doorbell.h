/// Where the threads of an agent's pool sleep, and how anybody on the host wakes one: the agent's own threads for jobs,
/// a peer's for a request that it has put into a ring.
///
/// A waker makes the system call only where somebody sleeps and nobody is looking. That is sound because each side
/// first writes what the other reads, and then reads what the other writes, all sequentially consistent:
///   waker:   publish the work;  then  read pollers, parked
///   sleeper: parked + 1, pollers - 1;  then  look for work once more;  then  sleep while `sequence` is what it was
/// tests/models/park.pml checks this, and that leaving out the sleeper's second look loses a wake-up.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "channels/shared_memory.h"
#include "channels/status.h"

namespace tensorferry {

class Doorbell final {
 public:
  static constexpr std::size_t bytes = 4096;

  /// The agent's own. Private memory where none can be shared: peers then use their sockets.
  static std::shared_ptr<Doorbell> create();
  /// A peer's, by the descriptor it sent. It may hold anything: all that this side does with it is to wake.
  static Result<std::shared_ptr<Doorbell>> map(FileDescriptor fd);

  /// After the work has been published: wakes one sleeper where nobody is looking.
  void ring() {
    if (page_->pollers.load(std::memory_order_seq_cst) == 0 && page_->parked.load(std::memory_order_seq_cst) > 0)
      wake();
  }
  /// Wakes one sleeper, whoever is looking.
  void wake();
  void wake_all();

  // ---- The agent's own threads
  /// From here on wakers need not make the system call for this thread's sake: it will look for work before it stops.
  void begin_polling() { page_->pollers.fetch_add(1, std::memory_order_seq_cst); }
  /// After this the thread must look at the rings once more, and call wake() for what it does not take itself.
  void end_polling() { page_->pollers.fetch_sub(1, std::memory_order_seq_cst); }
  [[nodiscard]] bool anybody_polling() const { return page_->pollers.load(std::memory_order_seq_cst) > 0; }
  [[nodiscard]] bool anybody_parked() const { return page_->parked.load(std::memory_order_seq_cst) > 0; }

  /// Between park() and unpark() wakers see this thread asleep; polling has ended. A ticket() is taken before.
  void park() {
    page_->parked.fetch_add(1, std::memory_order_seq_cst);
    end_polling();
  }
  /// Sleeps unless somebody rang since `ticket`. False: `limit` has passed.
  bool sleep(std::uint32_t ticket, std::optional<std::chrono::milliseconds> limit);
  void unpark() {
    begin_polling();
    page_->parked.fetch_sub(1, std::memory_order_seq_cst);
  }

  /// Somebody rang since `ticket`.
  [[nodiscard]] bool rung_since(std::uint32_t ticket) const {
    return page_->sequence.load(std::memory_order_seq_cst) != ticket;
  }
  [[nodiscard]] std::uint32_t ticket() const { return page_->sequence.load(std::memory_order_seq_cst); }

  /// False: this process can share no memory.
  [[nodiscard]] bool shareable() const noexcept { return static_cast<bool>(memory_); }
  /// For a peer to map. ResourceExhausted; an error after seclude().
  [[nodiscard]] Result<FileDescriptor> share() const;
  /// Closes the descriptor: no peer gets it any more.
  void seclude();

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
  std::unique_ptr<Page> own_;  // where memory_ is empty
  Page* page_;
};

}  // namespace tensorferry
