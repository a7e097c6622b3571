/// A storage that is being sent.
#pragma once

#include <c10/core/Storage.h>

#include <utility>

#include "channels/buffer.h"

namespace tensorferry {

/// Keeps a storage for whoever sends it. `leaves`: asked before the storage is let go; true leaves it to the end of the
/// process.
struct KeptStorage {
  KeptStorage(c10::Storage s, bool (*l)()) : storage(std::move(s)), leaves(l) {}
  ~KeptStorage() {
    if (leaves != nullptr && leaves()) storage.unsafeReleaseStorageImpl();
  }
  KeptStorage(const KeptStorage&) = delete;
  KeptStorage& operator=(const KeptStorage&) = delete;
  c10::Storage storage;
  bool (*leaves)();
};

/// The deleter of a DataPtr whose context is an Owner on the heap.
inline void drop_owner(void* owner) { delete static_cast<Owner*>(owner); }

}  // namespace tensorferry
