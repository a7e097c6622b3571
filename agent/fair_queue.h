/// A queue that serves its senders in turn.
#pragma once

#include <cstddef>
#include <deque>
#include <unordered_map>
#include <utility>

namespace tensorferry {

/// Keeps the items of one sender in order. pop() takes one item of each sender in turn, so a sender with many items
/// delays those of another sender by one item at most. A sender is known by its address alone. Not thread-safe.
template <class T>
class FairQueue {
 public:
  void push(const void* sender, T item) {
    auto& items = items_[sender];
    if (items.empty()) turns_.push_back(sender);
    items.push_back(std::move(item));
    ++size_;
  }
  /// The queue must not be empty.
  T pop() {
    const auto* sender = turns_.front();
    turns_.pop_front();
    const auto it = items_.find(sender);
    auto item = std::move(it->second.front());
    it->second.pop_front();
    if (it->second.empty())
      items_.erase(it);
    else
      turns_.push_back(sender);
    --size_;
    return item;
  }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }

 private:
  std::unordered_map<const void*, std::deque<T>> items_;  // of the senders in turns_
  std::deque<const void*> turns_;
  std::size_t size_ = 0;
};

}  // namespace tensorferry
