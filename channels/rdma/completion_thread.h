/// The thread on which the work of a driver's queue pairs completes.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/spin.h"
#include "channels/rdma/open_card.h"
#include "channels/rdma/queue_pair.h"

namespace tensorferry::rdma {

/// Sleeps until a card announces completions or an event (a port that went down, a queue pair that failed), then polls
/// the queue pairs that have work. While they have, it goes on polling for a while that adapts (base/spin.h). Without
/// work it polls nothing.
///
/// It keeps every queue pair until its work is done. The thread begins with the first queue pair, and keeps this object
/// until it ends. Held by a shared_ptr, whose owner calls end(). Thread-safe.
class CompletionThread final : public std::enable_shared_from_this<CompletionThread> {
 public:
  explicit CompletionThread(std::vector<std::shared_ptr<OpenCard>> cards);
  ~CompletionThread() = default;
  CompletionThread(const CompletionThread&) = delete;
  CompletionThread& operator=(const CompletionThread&) = delete;

  /// Takes over a queue pair. Fails with ResourceExhausted if the system gives no thread or no descriptor.
  Status add(std::shared_ptr<QueuePair> pair);
  /// Destroys a queue pair that has failed (QueuePair::fail), when the card has given its work back, and after
  /// `patience` in any case.
  void retire(const std::shared_ptr<QueuePair>& pair);

  /// Destroys the queue pairs, completes their work with an error, and waits for the thread. From then on add() fails,
  /// and retire() destroys at once. In a forked child it does nothing. On the thread itself, where a completion may
  /// drop the last reference to an agent, it does not wait: the thread does all that when the completion has returned.
  void end();

  static constexpr std::chrono::seconds patience{2};

 private:
  using Clock = std::chrono::steady_clock;
  struct Retired {
    std::shared_ptr<QueuePair> pair;
    Clock::time_point until;
  };
  /// What a card reports.
  struct Failure {
    const void* pair = nullptr;  // the one that has failed; null: those of the port
    int port = 0;                // 0: all ports of the card
    std::string why;
  };

  Status start();
  void wake() noexcept;
  void run();
  void take_over();
  void on_completions(OpenCard& card);
  void on_events(OpenCard& card);
  static std::optional<Failure> failure_of(const OpenCard& card, const ibv_async_event& event);
  void fail(OpenCard& card, const Failure& failure);
  bool poll_busy();
  void destroy_retired();

  const std::vector<std::shared_ptr<OpenCard>> cards_;
  const std::uint32_t born_in_ = forks();
  FileDescriptor poll_, woken_;

  Mutex mutex_;  // guards the members below
  bool started_ = false;
  bool ended_ = false;
  std::vector<std::shared_ptr<QueuePair>> added_, to_retire_;

  // Only for the thread:
  std::map<const void*, std::shared_ptr<QueuePair>> pairs_;
  std::vector<QueuePair*> busy_;
  std::vector<Retired> retired_;
  Spin spin_;

  std::thread thread_;
};

}  // namespace tensorferry::rdma
