/// The offers of a link whose sources the peer may still read, by their release ids. The peer's acknowledgement of an
/// id ends its offer.
///
/// Threads: any.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "channels/channel.h"

namespace tensorferry {

class ChannelBinding;

class OfferedBuffers final {
 public:
  struct Offered {
    ChannelBinding* binding;
    Ticket ticket;
  };
  using Id = std::uint64_t;  // 0: the offer ends without an acknowledgement

  /// Returns the id of a new offer.
  [[nodiscard]] Id next() {
    const std::lock_guard lock(mutex_);
    return ++last_;
  }
  /// Keeps the offers that have an id, until take(). After end() keeps none, and returns the link's status.
  Status add(std::vector<std::pair<Id, Offered>> offers) {
    const std::lock_guard lock(mutex_);
    if (ended_) return *ended_;
    for (auto& [id, offered] : offers) {
      if (id != 0) offers_.emplace(id, std::move(offered));
    }
    return {};
  }
  /// Takes out the offer with this id. Nullopt: there is none.
  std::optional<Offered> take(Id id) {
    const std::lock_guard lock(mutex_);
    const auto it = offers_.find(id);
    if (it == offers_.end()) return std::nullopt;
    auto offered = std::move(it->second);
    offers_.erase(it);
    return offered;
  }
  /// The link has ended with `status`. Drops the offers: their channels end them.
  void end(const Status& status) {
    const std::lock_guard lock(mutex_);
    ended_ = status;
    offers_.clear();
  }

 private:
  Mutex mutex_;  // guards the others
  Id last_ = 0;
  std::optional<Status> ended_;
  std::map<Id, Offered> offers_;
};

}  // namespace tensorferry
