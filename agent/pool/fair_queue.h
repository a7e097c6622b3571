/// A queue that serves its senders in turn.
#pragma once

#include <algorithm>
#include <cstddef>
#include <list>
#include <unordered_map>
#include <utility>

namespace tensorferry {

/// Keeps the items of one sender in order. pop() takes one item of each sender in turn, so a sender with many items
/// delays those of another sender by one item at most. A paused sender has no turn. A sender is known by its address
/// alone. Not thread-safe.
///
/// If there is no memory, push() and pause() throw, and push() leaves the item alone; the others need none. So all is
/// kept in lists, and each sender keeps the node of its turn while it has none.
template <class T>
class FairQueue {
 public:
  void push(const void* sender, T&& item) {
    std::list<T> one(1);
    auto& of = known(sender);
    one.front() = std::move(item);
    if (of.items.empty() && of.pauses == 0) turns_.splice(turns_.end(), of.turn);
    of.items.splice(of.items.end(), one);
    ++size_;
    if (of.pauses == 0) ++ready_;
  }
  /// ready() must not be 0.
  T pop() {
    const auto it = senders_.find(turns_.front());
    auto item = std::move(it->second.items.front());
    it->second.items.pop_front();
    if (it->second.items.empty()) {
      turns_.pop_front();
      senders_.erase(it);
    } else {
      turns_.splice(turns_.end(), turns_, turns_.begin());
    }
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
    auto& of = known(sender);
    if (of.pauses++ != 0) return;
    ++paused_;
    ready_ -= of.items.size();
    if (!of.items.empty()) of.turn.splice(of.turn.end(), turns_, std::find(turns_.begin(), turns_.end(), sender));
  }
  void resume(const void* sender) {
    const auto it = senders_.find(sender);
    if (it == senders_.end() || it->second.pauses == 0 || --it->second.pauses != 0) return;
    --paused_;
    ready_ += it->second.items.size();
    if (it->second.items.empty())
      senders_.erase(it);
    else
      turns_.splice(turns_.end(), it->second.turn);
  }
  [[nodiscard]] bool paused(const void* sender) const {
    if (paused_ == 0) return false;
    const auto it = senders_.find(sender);
    return it != senders_.end() && it->second.pauses != 0;
  }

  /// Takes out the items for which `wanted(sender, item)` is true, also those of paused senders.
  template <class Wanted>
  std::list<T> take_if(const Wanted& wanted) {
    std::list<T> taken;
    for (auto it = senders_.begin(); it != senders_.end();) {
      auto& [sender, of] = *it;
      const auto before = of.items.size();
      for (auto next = of.items.begin(); next != of.items.end();) {
        const auto item = next++;
        if (wanted(sender, *item)) taken.splice(taken.end(), of.items, item);
      }
      size_ -= before - of.items.size();
      if (of.pauses == 0) ready_ -= before - of.items.size();
      if (of.items.empty() && of.pauses == 0) std::erase(turns_, sender);
      if (of.items.empty() && of.pauses == 0)
        it = senders_.erase(it);
      else
        ++it;
    }
    return taken;
  }

 private:
  struct Sender {
    std::list<T> items;
    int pauses = 0;
    std::list<const void*> turn;  // empty while the sender has its turn in turns_
    bool has_turn = false;        // here or there
  };

  Sender& known(const void* sender) {
    auto& of = senders_[sender];
    if (!of.has_turn) of.turn.push_back(sender);
    of.has_turn = true;
    return of;
  }

  std::unordered_map<const void*, Sender> senders_;  // those that have items, and those that are paused
  std::list<const void*> turns_;                     // senders that have items and are not paused
  std::size_t size_ = 0, ready_ = 0;                 // items; without those of paused senders
  std::size_t paused_ = 0;                           // senders
};

}  // namespace tensorferry
