#include "channels/rdma/inbox.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/text.h"

namespace tensorferry::rdma {

Result<std::shared_ptr<Inbox>> Inbox::make(Registrations& registrations, std::size_t card, std::size_t bytes) {
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return status_of(errno, formatted("mapping an inbox of {} bytes", bytes));
  std::shared_ptr<Inbox> inbox(new Inbox(static_cast<std::byte*>(mapped), bytes));
  auto registered = registrations.make(inbox->base_, bytes, Access::written, {card});
  if (!registered.ok()) return registered.status();
  inbox->registration_ = std::move(*registered);
  inbox->key_ = inbox->registration_->keys(card).remote;
  return inbox;
}

Inbox::~Inbox() {
  if (born_in_ != forks()) return;
  registration_.reset();
  ::munmap(base_, bytes_);
}

void Inbox::take(std::uint64_t number, std::uint64_t offset, Taker taker) {
  Status why;
  {
    const std::lock_guard lock(mutex_);
    if (number > arrived_) {
      if (failure_.ok()) {
        waiting_.emplace(number, Waiting{offset, std::move(taker)});
        awaited_.store(true, std::memory_order_relaxed);
        return;
      }
      why = failure_;
    }
  }
  taker(why, why.ok() ? base_ + offset : nullptr);
}

void Inbox::arrived(std::uint64_t number) {
  std::vector<Waiting> ready;
  {
    const std::lock_guard lock(mutex_);
    if (number <= arrived_) return;
    arrived_ = number;
    const auto end = waiting_.upper_bound(number);
    for (auto at = waiting_.begin(); at != end; ++at) ready.push_back(std::move(at->second));
    waiting_.erase(waiting_.begin(), end);
    awaited_.store(!waiting_.empty(), std::memory_order_relaxed);
  }
  for (auto& each : ready) each.taker({}, base_ + each.offset);
}

void Inbox::fail(const Status& why) {
  std::multimap<std::uint64_t, Waiting> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok()) return;
    failure_ = why;
    dropped.swap(waiting_);
    awaited_.store(false, std::memory_order_relaxed);
  }
  for (auto& [number, each] : dropped) each.taker(why, nullptr);
}

}  // namespace tensorferry::rdma
