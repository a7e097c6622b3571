/// What several channels of one link, or several drivers of one agent, use together.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <typeindex>
#include <utility>

namespace tensorferry {

/// Finds an object by its type and by what it belongs to. It keeps no object: each lives as long as one of its users,
/// and after that the next user makes another. Thread-safe.
class SharedState final {
 public:
  /// Returns the object of type `T` that belongs to `key`. If no user has it, makes it: `make()` returns a
  /// std::shared_ptr<T>, must not use this SharedState, and runs while other users wait.
  template <class T, class Make>
  std::shared_ptr<T> find_or_make(const void* key, Make make) {
    const std::lock_guard lock(mutex_);
    auto& entry = entries_[{typeid(T), key}];
    if (auto known = entry.lock()) return std::static_pointer_cast<T>(std::move(known));
    std::shared_ptr<T> made = make();
    entry = made;
    return made;
  }

 private:
  std::mutex mutex_;  // not a Mutex (base/mutex.h), which is another type in a program's debug build
  std::map<std::pair<std::type_index, const void*>, std::weak_ptr<void>> entries_;
};

}  // namespace tensorferry
