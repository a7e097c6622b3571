#include "agent/pool/readable_set.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

namespace tensorferry {
namespace {

constexpr std::uint64_t wake_key = ~std::uint64_t{0};

}  // namespace

ReadableSet::ReadableSet() : epoll_(::epoll_create1(EPOLL_CLOEXEC)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;  // the eventfd is never read: each write to it is an edge
  event.data.u64 = wake_key;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
}

void ReadableSet::watch(int fd, Watch kind, bool armed, bool fresh) {
  epoll_event event{};
  event.data.u64 = static_cast<std::uint64_t>(fd);
  switch (kind) {
    case Watch::always:
      event.events = armed ? EPOLLIN | EPOLLRDHUP : 0U;
      break;
    case Watch::closing:
      event.events = EPOLLRDHUP | EPOLLET | (armed ? std::uint32_t{EPOLLIN} : 0U);
      break;
    case Watch::blocking:
      event.events = EPOLLONESHOT | (armed ? EPOLLIN | EPOLLRDHUP : 0U);
      break;
  }
  ::epoll_ctl(epoll_.get(), fresh ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event);
}

void ReadableSet::add(int fd, std::shared_ptr<Readable> readable, Watch kind) {
  entries_[fd] = {std::move(readable), kind};
  watch(fd, kind, kind != Watch::closing, true);
}

void ReadableSet::arm(int fd) {
  if (const auto it = entries_.find(fd); it != entries_.end()) watch(fd, it->second.watch, true, false);
}

void ReadableSet::disarm(int fd) {
  if (const auto it = entries_.find(fd); it != entries_.end()) watch(fd, it->second.watch, false, false);
}

std::shared_ptr<Readable> ReadableSet::remove(int fd) {
  const auto it = entries_.find(fd);
  if (it == entries_.end()) return nullptr;
  auto removed = std::move(it->second.readable);
  entries_.erase(it);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  return removed;
}

const ReadableSet::Entry* ReadableSet::find(int fd) const {
  const auto it = entries_.find(fd);
  return it != entries_.end() ? &it->second : nullptr;
}

ReadableSet::Ready ReadableSet::wait(std::unique_lock<std::mutex>& lock) {
  waits_ = true;
  lock.unlock();
  const auto found = ready(-1);
  lock.lock();
  waits_ = false;
  return found;
}

ReadableSet::Ready ReadableSet::poll() { return ready(0); }

/// `timeout`: as epoll_wait()'s.
ReadableSet::Ready ReadableSet::ready(int timeout) const {
  Ready found;
  std::array<epoll_event, found.fds.size()> events{};
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
  for (int i = 0; i < count; ++i) {
    const auto key = events[static_cast<std::size_t>(i)].data.u64;
    if (key != wake_key) found.fds[found.count++] = static_cast<int>(key);
  }
  return found;
}

void ReadableSet::interrupt() {
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

std::unordered_map<int, ReadableSet::Entry> ReadableSet::clear() { return std::exchange(entries_, {}); }

void ReadableSet::close() {
  epoll_.reset();
  wake_.reset();
}

}  // namespace tensorferry
