#include "agent/transport/socket_port.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <utility>

#include "agent/transport/tcp_liveness.h"
#include "base/foreign_descriptor.h"

namespace tensorferry {

std::ptrdiff_t SocketPort::read(std::span<iovec> into, Descriptors& descriptors, std::size_t most) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * 255)> ancillary{};
  msghdr message{};
  message.msg_iov = into.data();
  message.msg_iovlen = into.size();
  if (local_ && foreign_descriptor::may_receive()) {
    message.msg_control = ancillary.data();
    message.msg_controllen = ancillary.size();
  }
  const auto got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got <= 0) return got;
  std::size_t received = 0;
  bool unwanted = false;
  for (auto* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
      FileDescriptor descriptor(fd);
      if (!foreign_descriptor::closes_at_once(fd)) {
        unwanted = true;
        foreign_descriptor::close_apart(std::move(descriptor));
        continue;
      }
      if (descriptors.size() == most) continue;
      descriptors.push_back(std::move(descriptor));
      ++received;
    }
  }
  // At RLIMIT_NOFILE the system drops descriptors. One call receives those of one frame at most; the frame then comes
  // without any, and the channel of its message copes. So does a frame with a file or a socket, which no peer sends.
  if (unwanted || (message.msg_flags & MSG_CTRUNC) != 0) {
    descriptors.resize(descriptors.size() - received);
    if (descriptors.size() < most) descriptors.emplace_back();
  }
  return got;
}

std::ptrdiff_t SocketPort::write(std::span<iovec> from, std::span<const FileDescriptor> descriptors) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * 255)> ancillary{};
  msghdr message{};
  message.msg_iov = from.data();
  message.msg_iovlen = from.size();
  if (!descriptors.empty()) {
    message.msg_control = ancillary.data();
    message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
    auto* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    for (std::size_t i = 0; i < descriptors.size(); ++i) {
      const int fd = descriptors[i].get();
      std::memcpy(CMSG_DATA(header) + i * sizeof fd, &fd, sizeof fd);
    }
  }
  return ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void SocketPort::shutdown() noexcept { ::shutdown(socket_.get(), SHUT_RDWR); }

int SocketPort::connect_error() noexcept {
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

bool SocketPort::ended() const noexcept {
  pollfd state{socket_.get(), POLLRDHUP, 0};
  return ::poll(&state, 1, 0) > 0 && (state.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

std::size_t SocketPort::unread() const noexcept {
  int bytes = 0;
  ::ioctl(socket_.get(), FIONREAD, &bytes);
  return static_cast<std::size_t>(bytes);
}

BytesMoved SocketPort::moved() const noexcept { return local_ ? BytesMoved{} : bytes_moved(socket_.get()); }

void SocketPort::set_low_water_mark(int bytes) noexcept {
  if (!local_) ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

}  // namespace tensorferry
