/// What the threads of a C program take from an agent: events, and the numbers of memory that is free again.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tensorferry/c.h"

namespace tensorferry::c {

/// The events of one agent. Thread-safe. Calls of peers in it, and those that the program has taken and not answered,
/// are bounded in number and bytes.
class Events final : public std::enable_shared_from_this<Events> {
 public:
  Events(std::size_t most_calls, std::size_t most_bytes) : most_calls_(most_calls), most_bytes_(most_bytes) {}
  ~Events();
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  /// Counts a call of a peer with so many bytes. False: the bound is reached, or the agent has left.
  bool admit(std::size_t bytes);
  /// Ends the count of a call.
  void answered(std::size_t bytes);
  /// Adds a call. Drops it if the agent has left.
  void add_call(std::unique_ptr<tferry_call> call);
  void add_completed(std::uint64_t token);
  /// Waits for an event; nullopt: without a limit. TFERRY_NOTHING: the time has passed, or memory is free again that
  /// the library still read when the program asked last.
  tferry_event next(std::optional<std::chrono::milliseconds> timeout);
  /// Ends the events, and drops the calls among them.
  void leave();

  /// Returns an owner of the program's memory `number`, which adds the number to those released when it goes. 0: null.
  std::shared_ptr<void> owner_of(std::uint64_t number);
  std::size_t take_released(std::uint64_t* numbers, std::size_t most);

 private:
  void add_released(std::uint64_t number);

  const std::size_t most_calls_, most_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<tferry_event> events_;
  std::size_t calls_ = 0, bytes_ = 0;  // admitted and not answered
  bool left_ = false;
  bool has_released_ = false;  // a waiting thread shall ask for what was released
  std::mutex released_mutex_;  // never held with mutex_
  std::vector<std::uint64_t> released_;
  std::size_t lent_ = 0;  // numbers with an owner, and those in released_
  bool asked_ = false;    // the program has asked while numbers had owners: the next release wakes a thread
};

}  // namespace tensorferry::c
