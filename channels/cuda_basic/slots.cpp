#include "channels/cuda_basic/slots.h"

#include <algorithm>
#include <utility>

#include "channels/cuda/event_poller.h"

namespace tensorferry::cuda_basic {

Slots::Slab::Slab(cuda::Pinned pinned, Allocations::Kind kind)
    : pinned_(std::move(pinned)),
      generation_(Allocations::of_this_process().add(pinned_.data(), made_at_once * most_chunk_bytes, kind)) {}

Slots::Slab::~Slab() {
  if (pinned_) Allocations::of_this_process().remove(pinned_.data(), generation_);
}

Slots& Slots::of_this_process(Direction direction) {
  static auto& sent = *new Slots(Allocations::Kind::offers);
  static auto& received = *new Slots(Allocations::Kind::receives);
  return direction == Direction::out ? sent : received;
}

Result<std::byte*> Slots::lend(int device, UniqueFunction<void()> then) {
  const std::lock_guard lock(mutex_);
  used_ = std::chrono::steady_clock::now();
  if (!free_.empty()) {
    auto* const slot = free_.back();
    free_.pop_back();
    ++lent_;
    return slot;
  }
  if (!failed_.ok() && lent_ == 0 && !making_) return std::exchange(failed_, {});  // the next call tries again
  waiting_.push_back(std::move(then));
  if (memory_.size() * made_at_once < most && failed_.ok() && !std::exchange(making_, true))
    cuda::background().submit([this, device] { make(device); });
  return nullptr;
}

void Slots::give_back(std::byte* slot) {
  std::size_t free = 0;
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(slot);
    free = free_.size();
    --lent_;
    used_ = std::chrono::steady_clock::now();
    if (lent_ == 0 && !std::exchange(timed_, true))
      cuda::background().submit([this] { drop_if_idle(); }, std::chrono::steady_clock::now() + idle);
  }
  wake(free);  // a flow that was woken for an earlier slot may have ended without it
}

void Slots::make(int device) {
  auto memory = SharedMemory::create(made_at_once * most_chunk_bytes);
  auto pinned =
      memory.ok() ? cuda::Pinned::lock(std::move(*memory), device, false) : Result<cuda::Pinned>(memory.status());
  {
    const std::lock_guard lock(mutex_);
    making_ = false;
    failed_ = pinned.status();
    if (pinned.ok()) {
      const auto& slab = memory_.emplace_back(std::move(*pinned), kind_);
      for (std::size_t i = 0; i < made_at_once; ++i) free_.push_back(slab.slot(i));
    }
  }
  wake(most);
}

void Slots::drop_if_idle() {
  std::vector<Slab> unused;
  const std::lock_guard lock(mutex_);
  timed_ = false;
  if (lent_ != 0) return;  // the next slot that is given back begins again
  const auto until = used_ + idle;
  if (std::chrono::steady_clock::now() < until) {
    timed_ = true;
    cuda::background().submit([this] { drop_if_idle(); }, until);
    return;
  }
  unused.swap(memory_);
  free_.clear();
}

void Slots::wake(std::size_t count) {
  std::vector<UniqueFunction<void()>> due;
  {
    const std::lock_guard lock(mutex_);
    count = std::min(count, waiting_.size());
    const auto end = waiting_.begin() + static_cast<std::ptrdiff_t>(count);
    due.assign(std::make_move_iterator(waiting_.begin()), std::make_move_iterator(end));
    waiting_.erase(waiting_.begin(), end);
  }
  for (auto& each : due) each();
}

}  // namespace tensorferry::cuda_basic
