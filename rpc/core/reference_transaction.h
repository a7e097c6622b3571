/// For the sources of references.h: one hold of its lock.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "rpc/core/references.h"

namespace tensorferry {

/// Takes the lock; at its end posts what is to be posted, lets the lock go, and only then runs completions and sends,
/// and drops values: all of these may come back here.
class References::Transaction {
 public:
  explicit Transaction(References& references) : references_(references), lock_(references.mutex_) {}
  ~Transaction() {
    references_.deliver(*this);
    lock_.unlock();
    for (auto& each : later_) each();
  }
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;

  void later(UniqueFunction<void()> what) { later_.push_back(std::move(what)); }
  /// Lets go of a value, later.
  void discard(std::shared_ptr<void> value) { discarded_.push_back(std::move(value)); }
  /// This peer's queue has something new.
  void touch(std::uint64_t peer) { touched_.insert(peer); }

 private:
  friend class References;
  References& references_;
  std::vector<std::shared_ptr<void>> discarded_;
  std::vector<UniqueFunction<void()>> later_;
  std::unordered_set<std::uint64_t> touched_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace tensorferry
