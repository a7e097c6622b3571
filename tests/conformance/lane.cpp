#include "tests/conformance/lane.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "channels/completion.h"
#include "tests/conformance/outcome.h"

namespace tensorferry::conformance {

namespace {
constexpr std::size_t most_descriptors = 16;
constexpr std::size_t step = std::size_t{1} << 20;

Status gone() { return Status(Code::connection_lost, "the socket has ended"); }
}  // namespace

Lane::~Lane() {
  end();
  join();
}

void Lane::start(std::function<bool()> read_record, std::function<void()> ended) {
  writer_ = std::thread([this] { write_loop(); });
  reader_ = std::thread([this, read_record = std::move(read_record), ended = std::move(ended)] {
    while (read_record()) continue;
    end();
    ended();
  });
}

void Lane::send(Record record) {
  {
    std::lock_guard lock(mutex_);
    if (!ended_) {
      queue_.push_back(std::move(record));
      changed_.notify_all();
      return;
    }
  }
  for (auto& part : record.parts) complete(std::move(part.written), gone());
}

void Lane::write_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ended_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto record = std::move(queue_.front());
    queue_.pop_front();
    bool alive = !ended_;
    lock.unlock();
    alive = alive && write(record);
    for (auto& part : record.parts) {
      alive = alive && write_all(part.buffer.data, part.buffer.bytes);
      complete(std::move(part.written), alive ? Status() : gone());
    }
    if (!alive) end();
    lock.lock();
  }
}

/// Writes the length of the head, with the descriptors, then the head.
bool Lane::write(const Record& record) {
  auto length = static_cast<std::uint32_t>(record.head.size());
  iovec piece{&length, sizeof length};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(most_descriptors * sizeof(int))> space{};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (!record.descriptors.empty()) {
    const auto count = std::min(record.descriptors.size(), most_descriptors);
    message.msg_control = space.data();
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    auto* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    for (std::size_t i = 0; i < count; ++i) {
      const int fd = record.descriptors[i].get();
      std::memcpy(CMSG_DATA(header) + i * sizeof fd, &fd, sizeof fd);
    }
  }
  if (::sendmsg(socket_.get(), &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof length)) return false;
  return write_all(record.head.data(), record.head.size());
}

bool Lane::write_all(const std::byte* data, std::size_t bytes) {
  while (bytes > 0) {
    const auto sent = ::send(socket_.get(), data, std::min(bytes, step), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    data += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return true;
}

std::optional<std::pair<Bytes, Descriptors>> Lane::read_head() {
  std::uint32_t length = 0;
  iovec piece{&length, sizeof length};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(most_descriptors * sizeof(int))> space{};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = space.data();
  message.msg_controllen = space.size();
  if (::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_WAITALL) != static_cast<ssize_t>(sizeof length)) {
    return std::nullopt;
  }
  Descriptors descriptors;
  for (auto* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; CMSG_LEN(at) < header->cmsg_len; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + at, sizeof fd);
      descriptors.emplace_back(fd);
    }
  }
  Bytes head(length);
  for (std::size_t done = 0; done < length;) {
    const auto got = ::recv(socket_.get(), head.data() + done, length - done, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::nullopt;
    done += static_cast<std::size_t>(got);
  }
  return std::pair(std::move(head), std::move(descriptors));
}

/// Returns how many of `bytes` may be read now. Waits if the test has slowed the reader down, or holds it.
std::size_t Lane::allowed(std::size_t bytes) {
  std::unique_lock lock(mutex_);
  if (pause_.count() > 0) {
    bytes = std::min(bytes, chunk_);
    lock.unlock();
    std::this_thread::sleep_for(pause_);
    lock.lock();
  }
  if (left_ == 0U) {
    held_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return ended_ || left_ != 0U; });
    held_ = false;
  }
  if (left_ && !ended_) {
    bytes = std::min(bytes, *left_);
    *left_ -= bytes;
  }
  return std::min(bytes, step);
}

bool Lane::read(std::byte* to, std::size_t bytes) {
  std::vector<std::byte> dropped(to == nullptr ? std::min(bytes, step) : 0);
  while (bytes > 0) {
    for (auto now = allowed(bytes); now > 0;) {
      const auto got = ::recv(socket_.get(), to == nullptr ? dropped.data() : to, now, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      if (to != nullptr) to += got;
      now -= static_cast<std::size_t>(got);
      bytes -= static_cast<std::size_t>(got);
    }
  }
  return true;
}

void Lane::slow_down(std::size_t bytes, std::chrono::microseconds pause) {
  std::lock_guard lock(mutex_);
  chunk_ = bytes;
  pause_ = pause;
}

void Lane::hold_after(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  left_ = bytes;
}

bool Lane::held() {
  std::lock_guard lock(mutex_);
  return held_;
}

bool Lane::wait_ended() {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return ended_; });
}

void Lane::resume() {
  std::lock_guard lock(mutex_);
  left_.reset();
  changed_.notify_all();
}

void Lane::end_writing() { ::shutdown(socket_.get(), SHUT_WR); }

void Lane::end() {
  std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
  ::shutdown(socket_.get(), SHUT_RDWR);
}

void Lane::join() {
  if (writer_.joinable()) writer_.join();
  if (reader_.joinable()) reader_.join();
}

}  // namespace tensorferry::conformance
