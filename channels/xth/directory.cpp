#include "channels/xth/directory.h"

#include <optional>
#include <utility>

#include "base/fork.h"
#include "base/host.h"

namespace tensorferry::xth {

Id random_id() { return {random_word(), random_word()}; }

Id nonce_of_this_process() {
  static std::mutex mutex;
  static std::optional<Id> nonce;
  static std::uint32_t drawn_at = 0;
  std::lock_guard lock(mutex);
  if (!nonce || drawn_at != forks()) {
    nonce = random_id();
    drawn_at = forks();
  }
  return *nonce;
}

ChannelEnds& ChannelEnds::of_this_process() {
  static auto& directory = *new ChannelEnds;  // never destroyed: an agent may be closed by another static's destructor
  return directory;
}

void ChannelEnds::enter(const Id& id, std::shared_ptr<Offers> offers) {
  std::lock_guard lock(mutex_);
  ends_.emplace(id, std::move(offers));
}

void ChannelEnds::leave(const Id& id) {
  std::lock_guard lock(mutex_);
  ends_.erase(id);
}

std::shared_ptr<Offers> ChannelEnds::find(const Id& id) {
  std::lock_guard lock(mutex_);
  const auto found = ends_.find(id);
  return found == ends_.end() ? nullptr : found->second;
}

}  // namespace tensorferry::xth
