#include "channels/cuda/invalidate.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "channels/cuda/event_poller.h"

namespace tensorferry {
namespace cuda {
namespace {

struct Range {
  const std::byte* base;
  std::size_t bytes;
};

struct Listeners {
  Mutex mutex;  // guards the next two; held while listeners run
  std::map<std::size_t, InvalidationListener::Listener> listeners;
  std::size_t next = 1;

  Mutex queue_mutex;  // guards the queue; held only briefly, because its callers may hold an allocator's lock
  std::vector<Range> queue;

  static Listeners& of_this_process() {
    static auto& all = *new Listeners;
    return all;
  }

  void tell() {
    const std::lock_guard lock(mutex);
    std::vector<Range> ranges;
    {
      const std::lock_guard queue_lock(queue_mutex);
      ranges.swap(queue);
    }
    for (const auto& range : ranges) {
      for (const auto& [number, listener] : listeners) listener(range.base, range.bytes);
    }
  }
};

}  // namespace

InvalidationListener::InvalidationListener(Listener listener) {
  auto& all = Listeners::of_this_process();
  const std::lock_guard lock(all.mutex);
  number_ = all.next++;
  all.listeners.emplace(number_, std::move(listener));
}

InvalidationListener::~InvalidationListener() {
  auto& all = Listeners::of_this_process();
  const std::lock_guard lock(all.mutex);
  all.listeners.erase(number_);
}

}  // namespace cuda

namespace {
std::atomic<bool> untracked{false};
}  // namespace

void leave_cuda_memory_untracked() noexcept { untracked.store(true); }
bool cuda_memory_is_untracked() noexcept { return untracked.load(std::memory_order_relaxed); }

void invalidate_cuda_memory(const void* base, std::size_t bytes) noexcept {
  auto& all = cuda::Listeners::of_this_process();
  bool first = false;
  {
    const std::lock_guard lock(all.queue_mutex);
    first = all.queue.empty();
    all.queue.push_back({static_cast<const std::byte*>(base), bytes});
  }
  if (!first) return;
  cuda::EventPoller::of_this_process().poll_repeatedly([] {
    cuda::Listeners::of_this_process().tell();
    return cuda::EventPoller::Progress::over;
  });
}

}  // namespace tensorferry
