#include "agent/rendezvous/blocking_io.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace tensorferry {

namespace {

Status lost(const char* doing) { return {Code::connection_lost, std::string(doing) + ": " + std::strerror(errno)}; }

}  // namespace

Deadline deadline_after(std::chrono::milliseconds timeout) noexcept {
  using std::chrono::milliseconds;
  return std::chrono::steady_clock::now() +
         std::clamp(timeout, milliseconds(0), std::chrono::duration_cast<milliseconds>(std::chrono::hours(24 * 365)));
}

Status wait_for_socket(int fd, short events, Deadline deadline) {
  for (;;) {
    using std::chrono::milliseconds;
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    const auto slice = std::clamp(left, milliseconds(0), milliseconds(60000));  // poll(2) takes an int
    pollfd one{.fd = fd, .events = events, .revents = 0};
    const int ready = ::poll(&one, 1, static_cast<int>(slice.count()));
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return {Code::internal, std::string("poll: ") + std::strerror(errno)};
    if (std::chrono::steady_clock::now() >= deadline)
      return {Code::deadline_exceeded, "the peer did not answer in time"};
  }
}

Status read_exactly(int fd, std::span<std::byte> into, Deadline deadline) {
  while (!into.empty()) {
    const auto got = ::recv(fd, into.data(), into.size(), MSG_DONTWAIT);
    if (got > 0) {
      into = into.subspan(static_cast<std::size_t>(got));
    } else if (got == 0) {
      return {Code::connection_lost, "the peer closed the connection"};
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (auto status = wait_for_socket(fd, POLLIN, deadline); !status) return status;
    } else if (errno != EINTR) {
      return lost("reading");
    }
  }
  return {};
}

Status write_all(int fd, ByteView bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const auto put = ::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(put));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (auto status = wait_for_socket(fd, POLLOUT, deadline); !status) return status;
    } else if (errno != EINTR) {
      return lost("writing");
    }
  }
  return {};
}

bool spoiled(int fd) noexcept {
  std::byte peeked;
  ssize_t got = 0;
  do {
    got = ::recv(fd, &peeked, 1, MSG_PEEK | MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  return got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}

}  // namespace tensorferry
