#include "channels/cuda/invalidate.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "channels/cuda/event_poller.h"

namespace tensorferry {
namespace cuda {
namespace {

struct Range {
  const std::byte* base;
  std::size_t bytes;
};

struct Ears {
  std::mutex mutex;  // guards the next two; held while listeners run
  std::map<std::size_t, Forgetting::Listener> listeners;
  std::size_t next = 1;

  std::mutex queue_mutex;  // guards the queue; held only briefly, because its callers may hold an allocator's lock
  std::vector<Range> queue;

  static Ears& of_this_process() {
    static auto& ears = *new Ears;
    return ears;
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

Forgetting::Forgetting(Listener listener) {
  auto& ears = Ears::of_this_process();
  const std::lock_guard lock(ears.mutex);
  number_ = ears.next++;
  ears.listeners.emplace(number_, std::move(listener));
}

Forgetting::~Forgetting() {
  auto& ears = Ears::of_this_process();
  const std::lock_guard lock(ears.mutex);
  ears.listeners.erase(number_);
}

}  // namespace cuda

void forget_cuda_memory(const void* base, std::size_t bytes) noexcept {
  auto& ears = cuda::Ears::of_this_process();
  bool first = false;
  {
    const std::lock_guard lock(ears.queue_mutex);
    first = ears.queue.empty();
    ears.queue.push_back({static_cast<const std::byte*>(base), bytes});
  }
  if (!first) return;
  cuda::EventPoller::of_this_process().poll_repeatedly([] {
    cuda::Ears::of_this_process().tell();
    return cuda::EventPoller::Progress::over;
  });
}

}  // namespace tensorferry
