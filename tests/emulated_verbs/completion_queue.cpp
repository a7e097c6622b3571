#include "tests/emulated_verbs/completion_queue.h"

#include <utility>

#include "tests/emulated_verbs/host.h"

namespace tensorferry::emulated_verbs {

bool CompletionQueue::push(Completion completion) {
  const std::lock_guard lock(lock_);
  if (broken_) return false;
  if (entries_.size() >= static_cast<std::size_t>(cqe)) {
    broken_ = true;
    static_cast<Context*>(context)->events.push({IBV_EVENT_CQ_ERR, static_cast<ibv_cq*>(this), 0});
    return false;
  }
  entries_.push_back(std::move(completion));
  if (std::exchange(notifies_, false)) static_cast<CompletionChannel*>(channel)->events.push(this);
  return true;
}

int CompletionQueue::poll(int count, ibv_wc* entries) {
  const std::lock_guard lock(lock_);
  if (entries_.empty()) return broken_ ? -1 : 0;
  int polled = 0;
  for (; polled < count && !entries_.empty(); ++polled) {
    const auto& next = entries_.front();
    entries[polled] = next.entry;
    next.places->freed = next.index;
    entries_.pop_front();
  }
  return polled;
}

void CompletionQueue::notify() {
  const std::lock_guard lock(lock_);
  notifies_ = channel != nullptr;
}

void CompletionQueue::remove(const void* pair) {
  const std::lock_guard lock(lock_);
  std::erase_if(entries_, [&](const Completion& entry) { return entry.pair == pair; });
}

void CompletionQueue::delivered() {
  const std::lock_guard lock(lock_);
  ++open_events_;
}

void CompletionQueue::acknowledge(unsigned count) {
  const std::lock_guard lock(lock_);
  open_events_ -= count;
  acknowledged_.notify_all();
}

void CompletionQueue::wait_for_acknowledgements() {
  std::unique_lock lock(lock_);
  acknowledged_.wait(lock, [&] { return open_events_ == 0; });
}

}  // namespace tensorferry::emulated_verbs
