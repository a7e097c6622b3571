/// Transaction of References, for its source files alone.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "rpc/core/references.h"

namespace tensorferry {

/// Holds the lock of References for one operation. The destructor delivers posted operations and releases the lock.
/// Then it runs completions, sends messages and drops values, all of which may call References again.
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
  /// Drops `value` after the lock is released.
  void discard(std::shared_ptr<void> value) { discarded_.push_back(std::move(value)); }
  /// Notes that the queue of the peer of this incarnation has a new operation.
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
