/// A queue of events with a descriptor that is readable while the queue holds one, like the descriptors of libibverbs.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

namespace tensorferry::emulated_verbs {

template <class Event>
class EventQueue {
 public:
  EventQueue() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE)) {}
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;
  ~EventQueue() { ::close(fd_); }

  [[nodiscard]] int fd() const { return fd_; }

  void push(Event event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
    const std::uint64_t one = 1;
    (void)!::write(fd_, &one, sizeof one);
  }

  std::optional<Event> take() {
    return take([](const Event&) {});
  }

  /// Returns the oldest event, after `noted(event)` under the queue's lock. Waits for one, unless the descriptor has
  /// O_NONBLOCK: then it returns nullopt with errno EAGAIN.
  template <class Noted>
  std::optional<Event> take(Noted noted) {
    for (;;) {
      {
        const std::lock_guard lock(mutex_);
        if (!events_.empty()) {
          const auto event = events_.front();
          events_.pop_front();
          count_down();
          noted(event);
          return event;
        }
      }
      if ((::fcntl(fd_, F_GETFL) & O_NONBLOCK) != 0) {
        errno = EAGAIN;
        return std::nullopt;
      }
      pollfd readable{fd_, POLLIN, 0};
      if (::poll(&readable, 1, -1) < 0) return std::nullopt;
    }
  }

  /// Removes the events for which `of` is true.
  template <class Predicate>
  void remove(Predicate of) {
    const std::lock_guard lock(mutex_);
    const auto removed = std::erase_if(events_, of);
    for (std::size_t at = 0; at < removed; ++at) count_down();
  }

 private:
  void count_down() {  // never waits: the count is the number of events
    std::uint64_t one = 0;
    (void)!::read(fd_, &one, sizeof one);
  }

  int fd_;
  std::mutex mutex_;
  std::deque<Event> events_;
};

}  // namespace tensorferry::emulated_verbs
