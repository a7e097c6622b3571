#include "channels/offers.h"

#include <utility>
#include <vector>

#include "base/text.h"
#include "channels/completion.h"

namespace tensorferry {

std::optional<std::uint64_t> Offers::add(Buffer buffer, Completion released, bool shared) {
  std::lock_guard lock(mutex_);
  if (closed_) return std::nullopt;
  const auto number = next_++;
  entries_.emplace(number,
                   Entry{.buffer = std::move(buffer), .released = std::move(released), .shared = shared, .status = {}});
  return number;
}

Result<Offers::OfferedMemory> Offers::begin_copy(std::uint64_t number, std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (closed_) return *closed_;
  const auto found = entries_.find(number);
  if (found == entries_.end() || found->second.state != Entry::waiting || found->second.buffer.bytes != bytes) {
    return Status(Code::protocol_error,
                  formatted("the ticket names offer {} of {} bytes, which is not open", number, bytes));
  }
  found->second.state = Entry::copying;
  return OfferedMemory{found->second.buffer, found->second.shared};
}

void Offers::end_copy(std::uint64_t number) {
  std::unique_lock lock(mutex_);
  const auto found = entries_.find(number);
  if (found == entries_.end()) return;
  found->second.state = Entry::copied;
  if (!found->second.ended) return;
  auto entry = std::move(found->second);
  entries_.erase(found);
  lock.unlock();
  complete(std::move(entry.released), std::move(entry.status));
}

void Offers::end(std::uint64_t number) {
  std::unique_lock lock(mutex_);
  const auto found = entries_.find(number);
  if (found == entries_.end()) return;
  if (found->second.state == Entry::copying) {
    found->second.ended = true;
    return;
  }
  auto entry = std::move(found->second);
  entries_.erase(found);
  lock.unlock();
  complete(std::move(entry.released), {});
}

void Offers::close(Status status) {
  if (status.ok()) status = Status(Code::connection_lost, "the link has ended");
  std::vector<Entry> idle;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = status;
    for (auto at = entries_.begin(); at != entries_.end();) {
      if (at->second.state == Entry::copying) {
        if (!std::exchange(at->second.ended, true)) at->second.status = status;
        ++at;
      } else {
        idle.push_back(std::move(at->second));
        at = entries_.erase(at);
      }
    }
  }
  for (auto& entry : idle) complete(std::move(entry.released), status);
}

}  // namespace tensorferry
