#include "channels/cuda/invalidate.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "base/background.h"
#include "base/mutex.h"
#include "channels/allocations.h"
#include "channels/cuda/event_poller.h"

namespace tensorferry {
namespace {

struct Range {
  const std::byte* base;
  std::size_t bytes;
};

/// The memory of which the users of Allocations are still to be told.
struct Invalidated {
  Mutex mutex;  // held only briefly, because its callers may hold an allocator's lock
  std::vector<Range> ranges;

  static Invalidated& of_this_process() {
    static auto& all = *new Invalidated;
    return all;
  }
  void tell() {
    std::vector<Range> told;
    {
      const std::lock_guard lock(mutex);
      told.swap(ranges);
    }
    for (const auto& range : told) Allocations::of_this_process().invalidate_on_device(range.base, range.bytes);
  }
};

std::atomic<bool> untracked{false};

}  // namespace

void leave_cuda_memory_untracked() noexcept { untracked.store(true); }
bool cuda_memory_is_untracked() noexcept { return untracked.load(std::memory_order_relaxed); }

void invalidate_cuda_memory(const void* base, std::size_t bytes) noexcept {
  auto& all = Invalidated::of_this_process();
  bool first = false;
  {
    const std::lock_guard lock(all.mutex);
    first = all.ranges.empty();
    all.ranges.push_back({static_cast<const std::byte*>(base), bytes});
  }
  if (first) cuda::background().submit([] { Invalidated::of_this_process().tell(); });
}

}  // namespace tensorferry
