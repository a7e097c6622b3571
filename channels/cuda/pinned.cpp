#include "channels/cuda/pinned.h"

#include <mutex>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/mutex.h"
#include "channels/cuda/event_poller.h"
#include "channels/pinned_bytes.h"

namespace tensorferry::cuda {
namespace {

/// The locked pages whose owners were destroyed.
class Kept {
 public:
  static Kept& of_this_process() {
    static auto& kept = *new Kept;
    return kept;
  }

  void add(SharedMemory memory, int device) {
    if (born_in_ != forks()) return;  // in a forked child: a thread of the parent may have held the lock
    memory.close_descriptor();
    const std::lock_guard lock(mutex_);
    bytes_ += memory.bytes();
    pages_.push_back({std::move(memory), device});
    if (bytes_ > Pinned::most_kept) {
      bytes_ = 0;
      background().submit([pages = std::exchange(pages_, {})] { unlock(pages); });
    } else if (!std::exchange(timed_, true)) {
      background().submit([this] { unlock_all(); }, std::chrono::steady_clock::now() + Pinned::kept_for);
    }
  }

 private:
  struct Pages {
    SharedMemory memory;
    int device;
  };

  void unlock_all() {
    std::vector<Pages> pages;
    {
      const std::lock_guard lock(mutex_);
      pages.swap(pages_);
      bytes_ = 0;
      timed_ = false;
    }
    unlock(pages);
  }

  static void unlock(const std::vector<Pages>& pages) {
    for (const auto& each : pages) {
      const DeviceGuard here(each.device);
      if (here.status().ok()) api()->host_unregister(each.memory.data());
      pinned_bytes() -= each.memory.bytes();
    }
  }

  const std::uint32_t born_in_ = forks();
  Mutex mutex_;
  std::vector<Pages> pages_;
  std::size_t bytes_ = 0;
  bool timed_ = false;  // a job will unlock them
};

/// Counts `bytes` as page-locked; returns false if that exceeds the bound.
bool count(std::size_t bytes, bool bounded) {
  auto& all = pinned_bytes();
  auto now = all.load();
  do {
    if (bounded && bytes > Pinned::always_allowed && now + bytes > Pinned::most_bytes) return false;
  } while (!all.compare_exchange_weak(now, now + bytes));
  return true;
}

}  // namespace

Result<Pinned> Pinned::lock(SharedMemory memory, int device, bool bounded) {
  const DeviceGuard here(device);
  if (!here.status().ok()) return here.status();
  if (!count(memory.bytes(), bounded))
    return Status(Code::resource_exhausted, "this process has as much page-locked memory as it may have");
  auto result =
      api()->host_register(memory.data(), memory.bytes(), CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  if (result != CUDA_SUCCESS) {
    pinned_bytes() -= memory.bytes();
    return status_of(result, "page-locking memory");
  }
  Pinned pinned;
  result = api()->host_get_device_pointer(&pinned.address_, memory.data(), 0);
  pinned.memory_ = std::move(memory);
  pinned.device_ = device;
  if (result != CUDA_SUCCESS) return status_of(result, "finding page-locked memory's address");
  return pinned;
}

Pinned Pinned::unlocked(SharedMemory memory) {
  Pinned pinned;
  pinned.memory_ = std::move(memory);
  return pinned;
}

Pinned& Pinned::operator=(Pinned&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(address_, other.address_);
  std::swap(device_, other.device_);
  return *this;
}

Pinned::~Pinned() {
  if (memory_ && address_ != 0) Kept::of_this_process().add(std::move(memory_), device_);
}

Word word_at(const Pinned& memory, std::size_t offset) {
  return {reinterpret_cast<std::atomic<std::uint32_t>*>(memory.data() + offset), memory.on_device(offset)};
}

}  // namespace tensorferry::cuda
