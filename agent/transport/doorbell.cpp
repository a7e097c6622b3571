#include "agent/transport/doorbell.h"

#include <climits>
#include <new>
#include <utility>

#include "base/futex.h"

namespace tensorferry {

Doorbell::Doorbell(SharedMemory memory) : memory_(std::move(memory)) {
  if (!memory_) own_ = std::make_unique<Page>();
  page_ = own_ ? own_.get() : std::launder(reinterpret_cast<Page*>(memory_.data()));
}

std::shared_ptr<Doorbell> Doorbell::create() {
  auto memory = SharedMemory::create(bytes);
  return std::shared_ptr<Doorbell>(new Doorbell(memory ? std::move(*memory) : SharedMemory()));
}

Result<std::shared_ptr<Doorbell>> Doorbell::map(FileDescriptor fd) {
  auto memory = SharedMemory::map(std::move(fd), bytes);
  if (!memory) return memory.status();
  return std::shared_ptr<Doorbell>(new Doorbell(std::move(*memory)));
}

Result<FileDescriptor> Doorbell::share() const {
  const std::lock_guard lock(descriptor_mutex_);
  return memory_.share();
}

void Doorbell::close_descriptor() {
  const std::lock_guard lock(descriptor_mutex_);
  memory_.close_descriptor();
}

void Doorbell::wake() {
  page_->sequence.fetch_add(1, std::memory_order_seq_cst);
  shared_futex_wake(page_->sequence, 1);
}

void Doorbell::wake_all() {
  page_->sequence.fetch_add(1, std::memory_order_seq_cst);
  shared_futex_wake(page_->sequence, INT_MAX);
}

bool Doorbell::sleep(std::uint32_t ticket, std::optional<std::chrono::milliseconds> limit) {
  const auto until = limit ? FutexDeadline(std::chrono::steady_clock::now() + *limit) : std::nullopt;
  while (!rung_since(ticket)) {
    if (until && std::chrono::steady_clock::now() >= *until) return false;
    shared_futex_wait(page_->sequence, ticket, until);
  }
  return true;
}

}  // namespace tensorferry
