/// The rings that the threads of a pool poll, and the doorbell at which these threads sleep.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "agent/transport/doorbell.h"
#include "base/spin.h"

namespace tensorferry {

/// A ring that the pool's threads poll, because its requests (or answers) come through memory instead of a descriptor.
/// Thread-safe. The pool may still call it for a moment after its removal.
class RequestSource {
 public:
  virtual ~RequestSource() = default;
  /// Returns whether the ring has no entry. The writer rings the pool's doorbell after it has put an entry in.
  [[nodiscard]] virtual bool empty() const = 0;
  /// Returns whether the front entry needs the executor. A hint; the pool asks only if the ring is not empty.
  [[nodiscard]] virtual bool needs_executor() = 0;
  /// Takes the front entry, or each reply that has come, and handles it or submits a job for it; must not block. False:
  /// another thread has taken it.
  virtual bool serve_one() = 0;
  /// Returns the CPU on which the writer ran when it put in the last request that was taken; -1: not known.
  [[nodiscard]] virtual int peer_cpu() const { return -1; }
};

/// A list of rings never changes: add() and remove() make another list. So a thread polls its list without the mutex.
///
/// Threads: the pool's mutex guards add(), remove() and all().
class PolledRings final {
 public:
  using List = std::vector<std::shared_ptr<RequestSource>>;

  void add(std::shared_ptr<RequestSource> ring) {
    auto list = std::make_shared<List>(*all_);
    list->push_back(std::move(ring));
    all_ = std::move(list);
  }
  /// Returns the list before. The caller drops it after it has released the mutex, because it may be the last one that
  /// keeps the ring.
  [[nodiscard]] std::shared_ptr<const List> remove(const RequestSource* ring) {
    auto list = std::make_shared<List>(*all_);
    std::erase_if(*list, [&](const auto& one) { return one.get() == ring; });
    return std::exchange(all_, std::move(list));
  }
  [[nodiscard]] const std::shared_ptr<const List>& all() const noexcept { return all_; }
  /// Returns an empty list, for a thread that sleeps, so that it does not keep removed rings and their memory.
  [[nodiscard]] const std::shared_ptr<const List>& none() const noexcept { return none_; }

  [[nodiscard]] Doorbell& doorbell() noexcept { return *doorbell_; }
  /// Returns how long a thread polls before it sleeps.
  [[nodiscard]] Spin& spin() noexcept { return spin_; }

 private:
  const std::shared_ptr<Doorbell> doorbell_ = Doorbell::create();
  Spin spin_;
  const std::shared_ptr<const List> none_ = std::make_shared<List>();
  std::shared_ptr<const List> all_ = none_;
};

}  // namespace tensorferry
