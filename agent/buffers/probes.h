/// Counts the probes of a link's channels that have ended, and keeps the jobs that wait for the next one.
///
/// Threads: any. Runs jobs under no lock.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/function.h"
#include "base/mutex.h"

namespace tensorferry {

class Probes final {
 public:
  using Job = UniqueFunction<void()>;

  /// `run` runs a job on a pool thread.
  explicit Probes(std::function<void(Job)> run) : run_(std::move(run)) {}

  /// Returns how many have ended so far; nullopt after end().
  [[nodiscard]] std::optional<std::uint64_t> count() const {
    const std::lock_guard lock(mutex_);
    if (ended_) return std::nullopt;
    return count_;
  }
  /// Runs `job` once on a pool thread, when a probe has ended after count() returned `known`. After end(), runs it at
  /// once on the calling thread.
  void when_ended(std::uint64_t known, Job job) {
    bool now = false;
    {
      const std::lock_guard lock(mutex_);
      if (!ended_ && known == count_) {
        waiting_.push_back(std::move(job));
        return;
      }
      now = ended_;
    }
    if (now)
      job();
    else
      run_(std::move(job));
  }
  /// A probe has ended, at either end of a channel.
  void one_ended() {
    std::vector<Job> due;
    {
      const std::lock_guard lock(mutex_);
      ++count_;
      due.swap(waiting_);
    }
    for (auto& job : due) run_(std::move(job));
  }
  /// The link has ended. Hands out the jobs that wait; the caller runs them.
  std::vector<Job> end() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    return std::exchange(waiting_, {});
  }

 private:
  const std::function<void(Job)> run_;
  mutable Mutex mutex_;  // guards the others
  std::uint64_t count_ = 0;
  bool ended_ = false;
  std::vector<Job> waiting_;
};

}  // namespace tensorferry
