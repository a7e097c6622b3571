/// A queue that serves its senders in turn.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tensorferry {

/// Keeps the items of one sender in order. pop() takes one item of each sender in turn, so a sender with many items
/// delays those of another sender by one item at most. A paused sender has no turn. A sender is known by its address
/// alone. Not thread-safe.
template <class T>
class FairQueue {
 public:
  void push(const void* sender, T item) {
    auto& of = senders_[sender];
    if (of.items.empty() && of.pauses == 0) turns_.push_back(sender);
    of.items.push_back(std::move(item));
    ++size_;
    if (of.pauses == 0) ++ready_;
  }
  /// ready() must not be 0.
  T pop() {
    const auto* sender = turns_.front();
    turns_.pop_front();
    const auto it = senders_.find(sender);
    auto item = std::move(it->second.items.front());
    it->second.items.pop_front();
    if (it->second.items.empty())
      senders_.erase(it);
    else
      turns_.push_back(sender);
    --ready_;
    --size_;
    return item;
  }
  /// Returns how many items pop() may take.
  [[nodiscard]] std::size_t ready() const noexcept { return ready_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

  /// Pauses count: as many resume() end them.
  void pause(const void* sender) {
    auto& of = senders_[sender];
    if (of.pauses++ != 0) return;
    ++paused_;
    ready_ -= of.items.size();
    std::erase(turns_, sender);
  }
  void resume(const void* sender) {
    const auto it = senders_.find(sender);
    if (it == senders_.end() || it->second.pauses == 0 || --it->second.pauses != 0) return;
    --paused_;
    ready_ += it->second.items.size();
    if (it->second.items.empty())
      senders_.erase(it);
    else
      turns_.push_back(sender);
  }
  [[nodiscard]] bool paused(const void* sender) const {
    if (paused_ == 0) return false;
    const auto it = senders_.find(sender);
    return it != senders_.end() && it->second.pauses != 0;
  }

  /// Takes out the items for which `wanted(sender, item)` is true, also those of paused senders.
  template <class Wanted>
  std::vector<T> take_if(const Wanted& wanted) {
    std::vector<T> taken;
    for (auto it = senders_.begin(); it != senders_.end();) {
      auto& [sender, of] = *it;
      std::deque<T> kept;
      for (auto& item : of.items) {
        if (wanted(sender, item))
          taken.push_back(std::move(item));
        else
          kept.push_back(std::move(item));
      }
      size_ -= of.items.size() - kept.size();
      if (of.pauses == 0) ready_ -= of.items.size() - kept.size();
      of.items = std::move(kept);
      if (of.items.empty()) std::erase(turns_, sender);
      if (of.items.empty() && of.pauses == 0)
        it = senders_.erase(it);
      else
        ++it;
    }
    return taken;
  }

 private:
  struct Sender {
    std::deque<T> items;
    int pauses = 0;
  };
  std::unordered_map<const void*, Sender> senders_;  // those that have items, and those that are paused
  std::deque<const void*> turns_;                    // senders that have items and are not paused
  std::size_t size_ = 0, ready_ = 0;                 // items; without those of paused senders
  std::size_t paused_ = 0;                           // senders
};

}  // namespace tensorferry
