/// The receiver's tickets whose buffers the sender announces later, because their memory was busy when they were
/// offered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/mutex.h"
#include "base/status.h"

namespace tensorferry {

/// Joins tickets with the messages that announce their buffers. The two come in any order, and the first of them is
/// kept. Thread-safe; runs completions with no lock held.
///
/// `Pending` is what the receiver does with a ticket; `finish(status)` ends it. `Announcement` has the ticket's `id`.
template <class Pending, class Announcement>
class LaterTickets final {
 public:
  /// Bounds both the tickets and the announcements that a peer can make this end keep.
  static constexpr std::size_t most = std::size_t{1} << 16;

  /// Adds what to do with ticket `id`. Returns the announcement if it has come; else keeps `pending` and returns
  /// nullopt. Fails, and leaves `pending` as it is: ProtocolError if a ticket of this id is kept already, or too many
  /// are; after close().
  Result<std::optional<Announcement>> add(std::uint64_t id, Pending& pending) {
    const std::lock_guard lock(mutex_);
    if (!closed_.ok()) return closed_;
    if (const auto node = announced_.extract(id)) return std::optional(node.mapped());
    if (auto status = refusal_of(pending_, id); !status.ok()) return status;
    pending_.emplace(id, std::move(pending));
    return std::optional<Announcement>();
  }
  /// Adds an announcement. Returns what to do with its ticket if that is kept; else keeps `announced` and returns
  /// nullopt. Fails likewise.
  Result<std::optional<Pending>> announce(const Announcement& announced) {
    const std::lock_guard lock(mutex_);
    if (!closed_.ok()) return closed_;
    if (auto node = pending_.extract(announced.id)) return std::optional(std::move(node.mapped()));
    if (auto status = refusal_of(announced_, announced.id); !status.ok()) return status;
    announced_.emplace(announced.id, announced);
    return std::optional<Pending>();
  }
  /// Drops an announcement whose ticket never comes.
  void forget(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    announced_.erase(id);
  }
  /// Ends all tickets with `status`, an error. Later calls do nothing.
  void close(const Status& status) {
    std::unordered_map<std::uint64_t, Pending> pending;
    {
      const std::lock_guard lock(mutex_);
      if (!closed_.ok()) return;
      closed_ = status;
      pending.swap(pending_);
      announced_.clear();
    }
    for (auto& [id, each] : pending) each.finish(status);
  }

 private:
  template <class Kept>
  static Status refusal_of(const Kept& kept, std::uint64_t id) {
    if (kept.contains(id)) return {Code::protocol_error, "a busy buffer is named twice"};
    if (kept.size() == most) return {Code::protocol_error, "too many busy buffers are named"};
    return {};
  }

  Mutex mutex_;  // guards the members below
  Status closed_;
  std::unordered_map<std::uint64_t, Pending> pending_;
  std::unordered_map<std::uint64_t, Announcement> announced_;
};

}  // namespace tensorferry
