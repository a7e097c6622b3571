/// Completion queues and their channels, as strict as the strictest card.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "tests/emulated_verbs/event_queue.h"

namespace tensorferry::emulated_verbs {

/// Counts the work requests of one queue. As on mlx5, a place becomes free when a completion of its request, or of a
/// later one, is polled: requests without a completion of their own hold their places until then.
struct WorkPlaces {
  std::atomic<std::uint64_t> posted{0};
  std::atomic<std::uint64_t> freed{0};
};

struct Completion {
  ibv_wc entry{};
  std::shared_ptr<WorkPlaces> places;
  std::uint64_t index = 0;  // of its request, from 1
  const void* pair = nullptr;
};

class CompletionQueue;

struct CompletionChannel final : ibv_comp_channel {
  EventQueue<CompletionQueue*> events;
  std::atomic<int> queues{0};
};

class CompletionQueue final : public ibv_cq {
 public:
  /// Adds an entry, and an event if one was asked for. Returns false if the queue is full: then it is broken, as after
  /// IBV_EVENT_CQ_ERR, and takes no entry any more.
  bool push(Completion completion);
  /// Returns how many entries it has written to `entries`; -1 if the queue is broken and empty.
  int poll(int count, ibv_wc* entries);
  /// Asks for an event of the next entry.
  void notify();
  /// Drops the entries of a queue pair that ends.
  void remove(const void* pair);

  /// Counts the events that were delivered, which `acknowledge` must match before the queue can be destroyed.
  void delivered();
  void acknowledge(unsigned count);
  void wait_for_acknowledgements();

  std::atomic<int> pairs{0};

 private:
  std::mutex lock_;
  std::condition_variable acknowledged_;
  std::deque<Completion> entries_;
  bool notifies_ = false;
  bool broken_ = false;
  std::uint64_t open_events_ = 0;
};

}  // namespace tensorferry::emulated_verbs
