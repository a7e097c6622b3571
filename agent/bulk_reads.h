/// The destinations of the bulk bytes that a link expects: each is named by a binding's code and a sequence number.
///
/// Threads: any. Runs completions under no lock.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "channels/completion.h"

namespace tensorferry {

class BulkReads final {
 public:
  struct Name {
    std::uint32_t code = 0;  // ChannelBinding::code()
    std::uint64_t sequence = 0;
    auto operator<=>(const Name&) const = default;
  };
  struct Read {
    Buffer destination;  // no memory: the bytes are dropped
    Completion landed;
  };

  /// Adds a destination. True: take() finds it. False: it is not needed, and `landed` has run: with Ok if the bytes
  /// have another destination, with ProtocolError if both want the bytes, with the link's status after end().
  ///
  /// Bytes may be named twice if one of the two drops them: a sender that lost a connection withdraws a message that
  /// may have arrived. The other one gets the bytes then.
  bool add(Name name, Read read) {
    const auto drops = [](const Read& each) { return each.destination.data == nullptr; };
    Status failed;
    {
      const std::lock_guard lock(mutex_);
      if (ended_) {
        failed = *ended_;
      } else {
        const auto [it, added] = reads_.try_emplace(name, std::move(read));
        if (added) return true;
        if (!drops(read) && drops(it->second)) std::swap(read, it->second);
        if (!drops(read)) failed = {Code::protocol_error, "two tickets name the same bulk bytes"};
      }
    }
    complete(std::move(read.landed), failed);
    return false;
  }
  /// Takes out the destination of the bytes that have come. Nullopt: none has been added yet.
  std::optional<Read> take(Name name) {
    const std::lock_guard lock(mutex_);
    const auto it = reads_.find(name);
    if (it == reads_.end()) return std::nullopt;
    auto read = std::move(it->second);
    reads_.erase(it);
    return read;
  }
  /// Returns how many destinations wait for their bytes.
  [[nodiscard]] std::size_t waiting() const {
    const std::lock_guard lock(mutex_);
    return reads_.size();
  }
  /// The link has ended with `status`. Hands out the destinations whose bytes have not come; the caller completes them.
  std::map<Name, Read> end(const Status& status) noexcept {
    const std::lock_guard lock(mutex_);
    ended_ = status;
    return std::exchange(reads_, {});
  }

 private:
  mutable Mutex mutex_;  // guards the others
  std::optional<Status> ended_;
  std::map<Name, Read> reads_;
};

}  // namespace tensorferry
