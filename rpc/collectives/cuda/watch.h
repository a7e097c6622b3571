/// Watches the operations of a group that streams have been given, until the streams have ended them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/background.h"
#include "rpc/collectives/cuda/stream_words.h"
#include "rpc/collectives/raw_group.h"

namespace tensorferry::collectives::cuda {

/// An operation that has been enqueued. Thread-safe.
class Enqueued final {
 public:
  /// `keep`: what must last until the stream has ended the operation. The watch drops it then.
  Enqueued(std::shared_ptr<StreamWords> words, std::size_t rank, std::uint32_t number, Fingerprint called,
           std::chrono::steady_clock::time_point deadline, std::vector<std::shared_ptr<void>> keep)
      : words_(std::move(words)),
        rank_(rank),
        number_(number),
        called_(called),
        deadline_(deadline),
        keep_(std::move(keep)) {}

  /// Returns whether the stream has ended the operation.
  [[nodiscard]] bool ended() const { return words_->has_ended(rank_, number_); }
  /// Returns why the operation failed on the device, or Ok.
  [[nodiscard]] Status status() const {
    const std::lock_guard lock(mutex_);
    return status_;
  }
  /// The first error counts.
  void fail(const Status& why) {
    const std::lock_guard lock(mutex_);
    if (status_.ok()) status_ = why;
  }

 private:
  friend class DeviceWatch;
  const std::shared_ptr<StreamWords> words_;
  const std::size_t rank_;
  const std::uint32_t number_;
  const Fingerprint called_;
  const std::chrono::steady_clock::time_point deadline_;
  // Guarded by the lock of DeviceWatch.
  std::vector<std::shared_ptr<void>> keep_;
  std::uint32_t last_meeting_ = 0;
  bool by_flags_ = false;
  mutable std::mutex mutex_;
  Status status_;
};

/// Looks after the enqueued operations of one group, on one thread of the process, every 20 ms while there is one, or
/// while a kernel may have to be released. It reads the words, so it makes no call to the driver, and nothing that the
/// driver does holds it up.
///
/// - A rank whose process has ended fails the group, and streams that wait for it are released at once.
/// - An operation that reaches its deadline fails the group; the error names the ranks whose streams have not come.
/// - Ranks that were announced to call different operations (RawGroup::announce()) fail the group.
/// - A kernel that meets by flags is released by a word that it reads while it waits, and ends without a result.
/// - A kernel of a graph that waits for a rank in one meeting longer than the bound of watch_graphs() fails the group
///   too. Kernels tell for which ranks they wait, and in which meeting.
/// - If the group has failed for another reason, the streams get `grace` to end by themselves, then they are released.
///   A rank that has left has ended its operations before (DirectGroup::drain()), so this loses no result.
///
/// Thread-safe. Held by shared_ptr: the thread keeps it until all operations have ended.
class DeviceWatch final : public std::enable_shared_from_this<DeviceWatch> {
 public:
  static constexpr std::chrono::milliseconds period{20};
  static constexpr std::chrono::seconds grace{1};

  DeviceWatch(std::shared_ptr<RawGroup> group, std::shared_ptr<StreamWords> words)
      : group_(std::move(group)), words_(std::move(words)) {}

  /// Adds an operation, before its first meeting is enqueued.
  void add(std::shared_ptr<Enqueued> operation);
  /// The streams of the operation added last wait for the other ranks in this meeting.
  void meets(std::uint32_t meeting);
  /// The kernels of the operation added last meet by flags.
  void meets_by_flags();
  /// Kernels that meet by flags have been captured into a graph, which may be launched at any time: looks after them
  /// until the group's GPUs are dropped. `timeout` bounds how long each waits; the longest of all captures counts.
  void watch_graphs(std::chrono::steady_clock::duration timeout);
  void stop_watching_graphs();
  /// The operation added last cannot be ended by its stream, because the driver fails.
  void drop(const Status& why);
  /// Waits until all operations have ended. If the group has failed, it waits little longer than `grace`: a device that
  /// has failed too ends none. `interrupted` ends the wait.
  void drain(const std::function<bool()>& interrupted);

 private:
  void look();
  [[nodiscard]] bool replays_may_wait(std::chrono::steady_clock::time_point now) const;
  void drop_ended();
  std::vector<std::size_t> ranks_that_graphs_wait_for(std::chrono::steady_clock::time_point now);
  void release(bool all);
  void schedule();

  const std::shared_ptr<RawGroup> group_;
  const std::shared_ptr<StreamWords> words_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Enqueued>> operations_;
  std::uint32_t last_meeting_ = 0;
  bool looking_ = false;
  bool flags_ = false;          // a kernel may wait by flags
  bool graphs_ = false;         // and may be launched again, unless `dropped_since_`
  bool kernels_ended_ = false;  // the word that ends them has been written
  std::chrono::steady_clock::duration graph_timeout_{0};
  struct Waited {
    std::uint32_t meeting = 0;
    std::chrono::steady_clock::time_point since;
  };
  std::vector<Waited> waited_;  // by rank: for which kernels of graphs wait
  std::optional<std::chrono::steady_clock::time_point> failed_since_, dropped_since_;
  std::atomic<bool> asked_for_the_dead_{false};
};

/// The thread of this process that watches. Never destroyed.
Background& watcher();

}  // namespace tensorferry::collectives::cuda
