#include "agent/transport/blocking_io.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "agent/transport/address.h"
#include "agent/transport/tls_port.h"

namespace tensorferry {

namespace {

Status lost(const char* doing) { return {Code::connection_lost, std::string(doing) + ": " + std::strerror(errno)}; }

}  // namespace

Deadline deadline_after(std::chrono::milliseconds timeout, const Clock& clock) noexcept {
  using std::chrono::milliseconds;
  return clock.now() +
         std::clamp(timeout, milliseconds(0), std::chrono::duration_cast<milliseconds>(std::chrono::hours(24 * 365)));
}

Status wait_for_socket(int fd, short events, Deadline deadline, const Clock& clock) {
  for (;;) {
    pollfd one{.fd = fd, .events = events, .revents = 0};
    const int ready = clock.poll({&one, 1}, deadline);
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return {Code::internal, std::string("poll: ") + std::strerror(errno)};
    if (clock.now() >= deadline) return {Code::deadline_exceeded, "the peer did not answer in time"};
  }
}

Result<FileDescriptor> connect_tcp(const std::string& address, std::uint16_t port, Deadline deadline,
                                   const Clock& clock) {
  auto socket = start_connect_tcp(address, port);
  if (!socket) return socket;
  if (auto status = wait_for_socket(socket->get(), POLLOUT, deadline, clock); !status) return status;
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket->get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return Status(Code::connection_lost, std::strerror(error));
  return socket;
}

Status read_exactly(int fd, std::span<std::byte> into, Deadline deadline, const Clock& clock) {
  while (!into.empty()) {
    const auto got = ::recv(fd, into.data(), into.size(), MSG_DONTWAIT);
    if (got > 0) {
      into = into.subspan(static_cast<std::size_t>(got));
    } else if (got == 0) {
      return {Code::connection_lost, "the peer closed the connection"};
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (auto status = wait_for_socket(fd, POLLIN, deadline, clock); !status) return status;
    } else if (errno != EINTR) {
      return lost("reading");
    }
  }
  return {};
}

Status write_all(int fd, ByteView bytes, Deadline deadline, const Clock& clock) {
  while (!bytes.empty()) {
    const auto put = ::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(put));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (auto status = wait_for_socket(fd, POLLOUT, deadline, clock); !status) return status;
    } else if (errno != EINTR) {
      return lost("writing");
    }
  }
  return {};
}

namespace {

Status lost(const StreamPort& port, const char* doing) {
  auto by_errno = lost(doing);
  auto known = port.failure();
  return known.ok() ? by_errno : known;
}

}  // namespace

Status read_exactly(StreamPort& port, std::span<std::byte> into, Deadline deadline, const Clock& clock) {
  while (!into.empty()) {
    iovec part{into.data(), into.size()};
    Descriptors none;
    const auto got = port.read({&part, 1}, none, 0);
    if (got > 0) {
      into = into.subspan(static_cast<std::size_t>(got));
    } else if (got == 0) {
      return {Code::connection_lost, "the peer closed the connection"};
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (auto status = wait_for_socket(port.descriptor(), POLLIN, deadline, clock); !status) return status;
    } else if (errno != EINTR) {
      return lost(port, "reading");
    }
  }
  return {};
}

Status write_all(StreamPort& port, ByteView bytes, Deadline deadline, const Clock& clock) {
  while (!bytes.empty()) {
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    const auto put = port.write({&part, 1}, {});
    if (put >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(put));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (auto status = wait_for_socket(port.descriptor(), POLLOUT, deadline, clock); !status) return status;
    } else if (errno != EINTR) {
      return lost(port, "writing");
    }
  }
  return {};
}

Status secure(TlsPort& port, Deadline deadline, const Clock& clock) {
  for (;;) {
    const auto awaits = port.advance();
    if (awaits == TlsPort::Awaits::nothing) return port.failure();
    const short events = awaits == TlsPort::Awaits::readable ? POLLIN : POLLOUT;
    if (auto status = wait_for_socket(port.descriptor(), events, deadline, clock); !status) return status;
  }
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
