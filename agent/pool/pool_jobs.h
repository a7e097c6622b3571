/// The jobs of a pool: those that wait for a thread, and the places of the handlers that run.
///
/// Jobs that need the executor and those that do not (plain ones) wait in queues of their own. In each, jobs start in
/// the order of add(), and before the handlers. A handler needs a place to start, of which there are `places`. Waiting
/// handlers of different senders start in turn, those of one sender in the order of add().
///
/// Threads: the pool's mutex guards all functions, except those for which the comment says otherwise.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <utility>

#include "agent/pool/fair_queue.h"
#include "base/clock.h"
#include "base/function.h"

namespace tensorferry {

class PoolJobs final {
 public:
  struct Job {
    UniqueFunction<void()> run;
    bool takes_long = false;  // it may wait for a peer
    bool with_executor = false;
    bool handler = false;
    const void* sender = nullptr;  // of a handler's request
    std::optional<Clock::time_point> deadline = std::nullopt;
  };

  explicit PoolJobs(int places) : places_(places) {}

  /// If there is no memory, add() and put() throw and leave the job with the caller, who may hold the pool's mutex.
  void add(Job&& job) {
    put(std::move(job));
    begin_work();
  }
  /// Returns how many of the jobs with, or without, the executor may start now.
  [[nodiscard]] std::size_t startable(bool with_executor) const {
    const auto& queue = with_executor ? in_executor_ : plain_;
    const auto places = static_cast<std::size_t>(std::max(0, places_ - running_));
    return queue.jobs.size() + std::min(places, queue.handlers.ready());
  }
  /// Takes the next of them; there must be one. begin() or put() must follow.
  [[nodiscard]] Job take(bool with_executor) {
    auto& queue = with_executor ? in_executor_ : plain_;
    if (queue.jobs.empty()) return queue.handlers.pop();
    auto job = std::move(queue.jobs.front());
    queue.jobs.pop_front();
    return job;
  }
  /// Returns whether this job, which waits in no queue, may start: a handler needs a place, and its sender no pause.
  [[nodiscard]] bool may_begin(const Job& job) const {
    return !job.handler || (place_free() && !in_executor_.handlers.paused(job.sender));
  }
  /// Puts a job that has been taken, or that was in no queue, last in its queue.
  void put(Job&& job) {
    auto& queue = job.with_executor ? in_executor_ : plain_;
    if (job.handler) {
      const auto* sender = job.sender;
      queue.handlers.push(sender, std::move(job));
    } else {
      queue.jobs.push_back(std::move(job));
    }
    count();
  }
  /// The job starts to run; a handler takes a place.
  void begin(const Job& job) {
    if (job.handler) ++running_;
    count();
  }
  /// The job has run.
  void end(const Job& job) {
    ++finished_;
    end_work();
    if (job.handler) free_place();
  }
  /// A handler that runs gives its place up while it waits, and takes one again, even if all are taken by now.
  void free_place() {
    --running_;
    count();
  }
  void retake_place() {
    ++running_;
    count();
  }
  [[nodiscard]] bool place_free() const { return running_ < places_; }

  /// Lets no waiting handler of `sender` start until as many resume().
  void pause(const void* sender) {
    for (auto* queue : {&plain_, &in_executor_}) queue->handlers.pause(sender);
    count();
  }
  void resume(const void* sender) {
    for (auto* queue : {&plain_, &in_executor_}) queue->handlers.resume(sender);
    count();
  }
  /// Makes the waiting handlers of `sender` jobs that need no place.
  void start_waiting(const void* sender) {
    start_if([sender](const void* of, const Job&) { return of == sender; });
  }
  /// Does so with waiting handlers whose deadline has passed; looks ten times a second of the clock. False: it has not
  /// looked.
  bool start_expired(Clock::time_point now) {
    if (plain_.handlers.empty() && in_executor_.handlers.empty()) return false;
    if (now - looked_for_expired_ < std::chrono::milliseconds(100)) return false;
    looked_for_expired_ = now;
    start_if([now](const void*, const Job& job) { return job.deadline && *job.deadline <= now; });
    return true;
  }

  /// Returns the number of handlers that run and hold a place, and of those that wait for one.
  [[nodiscard]] int running() const noexcept { return running_; }
  [[nodiscard]] std::size_t waiting() const noexcept { return plain_.handlers.size() + in_executor_.handlers.size(); }
  /// Returns whether handlers wait whose senders are not paused.
  [[nodiscard]] bool any_handler_waits() const noexcept {
    return plain_.handlers.ready() + in_executor_.handlers.ready() != 0;
  }
  /// Returns how many jobs have ended since the last call of this function.
  std::uint64_t finished_since_last() { return finished_ - std::exchange(finished_before_, finished_); }

  /// Returns whether no job may start, apart from one that was taken. Without the mutex too.
  [[nodiscard]] bool caught_up() const noexcept { return startable_.load(std::memory_order_relaxed) == 0; }
  /// Returns whether jobs wait or run, or other work between begin_work() and end_work(). Without the mutex too, all
  /// three.
  [[nodiscard]] bool busy() const noexcept { return busy_.load(std::memory_order_seq_cst) != 0; }
  void begin_work() noexcept { busy_.fetch_add(1, std::memory_order_seq_cst); }
  void end_work() noexcept { busy_.fetch_sub(1, std::memory_order_seq_cst); }

 private:
  struct Queue {
    std::list<Job> jobs;  // start_if() needs no memory
    FairQueue<Job> handlers;
  };

  void count() { startable_.store(startable(false) + startable(true), std::memory_order_relaxed); }
  template <class Wanted>
  void start_if(const Wanted& wanted) {
    for (auto* queue : {&plain_, &in_executor_}) {
      auto taken = queue->handlers.take_if(wanted);
      for (auto& job : taken) job.handler = false;
      queue->jobs.splice(queue->jobs.end(), taken);
    }
    count();
  }

  const int places_;
  Queue plain_;
  Queue in_executor_;
  int running_ = 0;  // handlers with a place
  Clock::time_point looked_for_expired_;
  std::uint64_t finished_ = 0;
  std::uint64_t finished_before_ = 0;
  std::atomic<std::size_t> startable_{0};
  std::atomic<int> busy_{0};
};

}  // namespace tensorferry
