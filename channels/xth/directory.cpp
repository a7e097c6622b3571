#include "channels/xth/directory.h"

#include <utility>

#include "channels/host.h"

namespace tensorferry::xth {

Id random_id() { return {random_word(), random_word()}; }

Directory& Directory::of_this_process() {
  static auto& directory = *new Directory;  // never destroyed: an agent may be closed by another static's destructor
  return directory;
}

void Directory::enter(const Id& id, std::shared_ptr<Offers> offers) {
  std::lock_guard lock(mutex_);
  ends_.emplace(id, std::move(offers));
}

void Directory::leave(const Id& id) {
  std::lock_guard lock(mutex_);
  ends_.erase(id);
}

std::shared_ptr<Offers> Directory::find(const Id& id) {
  std::lock_guard lock(mutex_);
  const auto found = ends_.find(id);
  return found == ends_.end() ? nullptr : found->second;
}

}  // namespace tensorferry::xth
