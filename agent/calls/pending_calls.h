/// The table of a link's calls that wait for a reply. Its slots have generations, so that a late reply never reaches
/// the next call in the same slot.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "agent/call_state.h"
#include "base/mutex.h"

namespace tensorferry {

/// Thread-safe. An id is generation << 32 | slot, never 0, and opaque to the peer.
class PendingCalls final {
 public:
  /// Adds the call and returns its id. Sets `call->place.id` before other threads can find the call, because the link
  /// may end at any moment.
  std::uint64_t add(std::shared_ptr<Call::State> call) {
    const std::lock_guard lock(mutex_);
    std::uint32_t index = 0;
    if (free_.empty()) {
      index = static_cast<std::uint32_t>(slots_.size());
      slots_.emplace_back();
      try {
        free_.reserve(slots_.capacity());  // so that a call can end without memory
      } catch (...) {
        slots_.pop_back();
        throw;
      }
    } else {
      index = free_.back();
      free_.pop_back();
    }
    auto& slot = slots_[index];
    const auto id = call->place.id = std::uint64_t{slot.generation} << 32 | index;
    slot.call = std::move(call);
    ++count_;
    ++added_;
    return id;
  }
  /// Returns the call, or null if it has ended or the id was never given out.
  std::shared_ptr<Call::State> find(std::uint64_t id) const {
    const std::lock_guard lock(mutex_);
    const auto* slot = slot_of(id);
    return slot != nullptr ? slot->call : nullptr;
  }
  struct ReplyDestination {
    std::shared_ptr<Call::State> call;  // as find() returns it
    bool again = false;                 // a reply came before this one
  };
  /// Marks the call as landing: its reply has come. From then on the channels may write to the caller's own memory, so
  /// give_up() leaves the call alone.
  ReplyDestination land(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto* slot = slot_of(id);
    ++replies_;
    if (slot == nullptr) return {};
    return {slot->call, slot->call->progress.landing.exchange(true)};
  }
  /// Takes the call out, to end it. If several threads try, one gets the call and the others get null.
  std::shared_ptr<Call::State> remove(std::uint64_t id) { return take(id, true); }
  /// Like remove(), but returns null for a call whose reply is landing in the caller's own memory: that call ends when
  /// its landing does.
  std::shared_ptr<Call::State> give_up(std::uint64_t id) { return take(id, false); }
  [[nodiscard]] std::vector<std::shared_ptr<Call::State>> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Call::State>> calls;
    for (const auto& slot : slots_) {
      if (slot.call) calls.push_back(slot.call);
    }
    return calls;
  }
  /// Returns how many calls have been added, also those that have ended.
  [[nodiscard]] std::uint64_t added() const {
    const std::lock_guard lock(mutex_);
    return added_;
  }
  /// Returns how many replies have come, also of calls that had ended.
  [[nodiscard]] std::uint64_t replies() const {
    const std::lock_guard lock(mutex_);
    return replies_;
  }
  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return count_;
  }

 private:
  std::shared_ptr<Call::State> take(std::uint64_t id, bool landing_too) {
    const std::lock_guard lock(mutex_);
    auto* slot = const_cast<PendingSlot*>(slot_of(id));
    if (slot == nullptr || (!landing_too && slot->call->lands_at_callers())) return nullptr;
    ++slot->generation;
    free_.push_back(static_cast<std::uint32_t>(id));
    --count_;
    return std::move(slot->call);
  }

  struct PendingSlot {
    std::shared_ptr<Call::State> call;
    std::uint32_t generation = 1;
  };
  [[nodiscard]] const PendingSlot* slot_of(std::uint64_t id) const {
    const auto index = static_cast<std::uint32_t>(id);
    if (index >= slots_.size()) return nullptr;
    const auto& slot = slots_[index];
    return slot.call && slot.generation == id >> 32 ? &slot : nullptr;
  }

  mutable Mutex mutex_;
  std::vector<PendingSlot> slots_;
  std::vector<std::uint32_t> free_;
  std::size_t count_ = 0;
  std::uint64_t added_ = 0, replies_ = 0;
};

}  // namespace tensorferry
