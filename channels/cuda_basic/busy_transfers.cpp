#include "channels/cuda_basic/busy_transfers.h"

#include <mutex>
#include <utility>

#include "channels/completion.h"
#include "channels/cuda/event_poller.h"

namespace tensorferry::cuda_basic {

Result<std::uint64_t> BusyTransfers::add(Transfer& transfer, Then then) {
  std::uint64_t id = 0;
  cuda::GpuEvent ready;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_.ok()) return closed_;
    id = ++last_;
    auto& entry = entries_[id];  // first: without memory the transfer must not end under this lock
    ready = std::move(transfer.ready);
    entry = {std::move(transfer), std::move(then)};
  }
  cuda::EventPoller::of_this_process().when_done(
      cuda::Watch::closely, std::move(ready),
      [self = shared_from_this(), id](const Status& status) { self->passed(id, status); });
  return id;
}

void BusyTransfers::passed(std::uint64_t id, const Status& status) {
  std::optional<Entry> entry;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(id);
    if (found == entries_.end()) return;  // taken, or closed
    entry = std::move(found->second);
    entries_.erase(found);
  }
  entry->then(id, std::move(entry->transfer), status);
}

std::optional<Transfer> BusyTransfers::take(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  auto node = entries_.extract(id);
  if (node.empty()) return std::nullopt;
  return std::move(node.mapped().transfer);
}

std::size_t BusyTransfers::size() {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

void BusyTransfers::close(const Status& status) {
  std::unordered_map<std::uint64_t, Entry> entries;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_.ok()) return;
    closed_ = status;
    entries.swap(entries_);
  }
  for (auto& [id, entry] : entries) entry.transfer.finish(status);
}

}  // namespace tensorferry::cuda_basic
