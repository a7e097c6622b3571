/// The control messages that have come from the peer of a link, by their ids, and the pulls that wait for one of them.
///
/// Threads: any, but is_next() and received() only on the thread that handles a control frame. Runs pulls under no
/// lock.
#pragma once

#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "channels/channel.h"

namespace tensorferry {

class IncomingControls final {
 public:
  /// The pulls that may wait. Control messages come before the requests that need them, or soon after.
  static constexpr std::size_t most_waiting = std::size_t{1} << 17;
  /// Gets Ok when its message has come, or the link's status if the link ends before.
  using Pull = std::function<void(const Status&)>;

  /// Returns whether message `id` follows the last one that was received.
  [[nodiscard]] bool is_next(ControlId id) const { return id == received_ + 1; }
  /// Message `id` has been handled. Hands out the pulls that waited for it, in the order of when_received(); the caller
  /// runs them.
  std::vector<Pull> received(ControlId id) {
    std::vector<Pull> due;
    const std::lock_guard lock(mutex_);
    received_ = id;
    const auto ready = std::stable_partition(waiting_.begin(), waiting_.end(),
                                             [&](const auto& waiting) { return waiting.first > id; });
    due.reserve(static_cast<std::size_t>(waiting_.end() - ready));  // throws before a pull has left the list
    for (auto it = ready; it != waiting_.end(); ++it) due.push_back(std::move(it->second));
    waiting_.erase(ready, waiting_.end());
    return due;
  }
  /// Runs `pull` when message `after` has been received: now, if it has been already or if the link has ended. Runs it
  /// with ProtocolError, now, if `most_waiting` others wait: the caller must then end the link.
  void when_received(ControlId after, Pull pull) {
    Status failed;
    {
      const std::lock_guard lock(mutex_);
      if (after > received_ && !ended_ && waiting_.size() < most_waiting) {
        waiting_.emplace_back(after, std::move(pull));
        return;
      }
      if (after > received_) {
        failed =
            ended_.value_or(Status(Code::protocol_error, "too many buffers wait for control messages of the peer"));
      }
    }
    pull(failed);
  }
  /// What pulls wait for, for error texts: how many wait, the first message that one of them needs, and the last one
  /// that has come.
  struct Waiting {
    std::size_t pulls = 0;
    ControlId needed = 0, received = 0;
  };
  [[nodiscard]] Waiting waiting() const {
    const std::lock_guard lock(mutex_);
    Waiting out{waiting_.size(), 0, received_};
    for (const auto& [after, pull] : waiting_) out.needed = out.needed == 0 ? after : std::min(out.needed, after);
    return out;
  }
  /// The link has ended with `status`. Hands out the pulls that wait; the caller runs them with it.
  std::vector<std::pair<ControlId, Pull>> end(const Status& status) noexcept {
    const std::lock_guard lock(mutex_);
    ended_ = status;
    return std::exchange(waiting_, {});
  }

 private:
  mutable Mutex mutex_;  // guards the others
  ControlId received_ = 0;
  std::optional<Status> ended_;
  std::vector<std::pair<ControlId, Pull>> waiting_;
};

}  // namespace tensorferry
