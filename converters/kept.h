/// Owners by which buffers keep torch storages alive, and storages keep buffers' owners alive.
#pragma once

#include <c10/core/Storage.h>

#include <utility>

#include "channels/buffer.h"

namespace tensorferry {

/// Keeps a storage while its bytes are sent. The destructor calls `leaves`; if that returns true, it leaks the storage
/// instead of releasing it.
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

/// The deleter of a DataPtr whose context is a heap-allocated Owner.
inline void drop_owner(void* owner) { delete static_cast<Owner*>(owner); }

}  // namespace tensorferry
