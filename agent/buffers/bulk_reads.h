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
#include "base/text.h"
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

  /// The reads at once that drop their bytes. They cost no memory of a buffer, so a peer could name any number.
  static constexpr std::size_t most_dropping = std::size_t{1} << 17;
  /// Returns the error of one more.
  static Status too_many() {
    return {
        Code::protocol_error,
        formatted("{} parts of buffers are to be dropped and have not come: let fewer large messages be under way at "
                  "once",
                  most_dropping + 1)};
  }
  enum class Added : std::uint8_t { waits, unneeded, too_many };

  /// Adds a destination. waits: take() finds it. unneeded: `landed` has run: with Ok if the bytes have another
  /// destination, with ProtocolError if both want the bytes, with the link's status after end(). too_many: `landed` has
  /// run with ProtocolError, because `most_dropping` others drop their bytes; the caller must end the link.
  ///
  /// Bytes may be named twice if one of the two drops them: a sender that lost a connection withdraws a message that
  /// may have arrived. The other one gets the bytes then.
  Added add(Name name, Read read) {
    Status failed;
    auto result = Added::unneeded;
    {
      const std::lock_guard lock(mutex_);
      if (ended_) {
        failed = *ended_;
      } else if (drops(read) && dropping_ >= most_dropping) {
        failed = too_many();
        result = Added::too_many;
      } else {
        const auto [it, added] = reads_.try_emplace(name);
        if (added) {
          it->second = std::move(read);
          dropping_ += drops(it->second) ? 1 : 0;
          return Added::waits;
        }
        if (!drops(read) && drops(it->second)) {
          std::swap(read, it->second);
          --dropping_;
        }
        if (!drops(read)) failed = {Code::protocol_error, "two tickets name the same bulk bytes"};
      }
    }
    complete(std::move(read.landed), failed);
    return result;
  }
  /// Takes out the destination of the bytes that have come. Nullopt: none has been added yet.
  std::optional<Read> take(Name name) {
    const std::lock_guard lock(mutex_);
    const auto it = reads_.find(name);
    if (it == reads_.end()) return std::nullopt;
    auto read = std::move(it->second);
    reads_.erase(it);
    dropping_ -= drops(read) ? 1 : 0;
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
  static bool drops(const Read& read) { return read.destination.data == nullptr; }

  mutable Mutex mutex_;  // guards the others
  std::size_t dropping_ = 0;
  std::optional<Status> ended_;
  std::map<Name, Read> reads_;
};

}  // namespace tensorferry
