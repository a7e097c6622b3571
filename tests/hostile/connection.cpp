#include "tests/hostile/connection.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

namespace hostile {
namespace {

constexpr std::chrono::seconds patience{5};

int connected_by_unix_socket(const std::string& address) {
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path, address.data(), std::min(address.size(), sizeof to.sun_path - 1));
  if (address[0] == '@') to.sun_path[0] = '\0';
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size());
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&to), length) == 0) return fd;
  ::close(fd);
  return -1;
}

int connected_by_tcp(const std::string& address) {
  const auto colon = address.rfind(':');
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(colon + 1))));
  ::inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int at_once = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0) return fd;
  ::close(fd);
  return -1;
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Connection Connection::dial(const std::string& address) {
  Connection made;
  made.unix_ = address[0] == '@' || address[0] == '/';
  made.socket_ = Descriptor(made.unix_ ? connected_by_unix_socket(address) : connected_by_tcp(address));
  made.ended_ = made.socket_.get() < 0;
  const timeval limit{0, 500'000};  // an agent may read nothing more of a connection for bulk data
  ::setsockopt(made.socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  return made;
}

bool Connection::handshake(std::string_view key, std::string_view random_bytes) {
  const auto mine = preamble(random_bytes);
  if (!write(mine)) return false;
  const auto answer = exactly(preamble_bytes + proof_bytes);
  if (!answer) return false;
  const auto theirs = std::string_view(*answer).substr(0, preamble_bytes);
  if (answer->substr(preamble_bytes) != proof(key, false, mine, theirs)) return false;
  return write(proof(key, true, mine, theirs));
}

bool Connection::write(std::string_view bytes, const std::vector<int>& descriptors) {
  std::array<char, CMSG_SPACE(64 * sizeof(int))> control{};
  bool attached = descriptors.empty();
  while (!ended_ && !bytes.empty()) {
    iovec part{const_cast<char*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!std::exchange(attached, true)) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
      auto* const head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
      std::memcpy(CMSG_DATA(head), descriptors.data(), descriptors.size() * sizeof(int));
    }
    const auto sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    if (sent <= 0) {
      ended_ = true;
      break;
    }
    bytes.remove_prefix(static_cast<std::size_t>(sent));
  }
  return !ended_;
}

bool Connection::fill(std::chrono::milliseconds limit) {
  pollfd ready{socket_.get(), POLLIN, 0};
  if (ended_ || ::poll(&ready, 1, static_cast<int>(limit.count())) <= 0) return false;
  std::array<char, 65536> bytes;
  std::array<char, CMSG_SPACE(64 * sizeof(int))> control{};
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const auto got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got <= 0) {
    ended_ = true;
    return false;
  }
  for (auto* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t i = 0; i < (head->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(head) + i * sizeof(int), sizeof fd);
      received_.emplace_back(fd);
    }
  }
  std::string_view come(bytes.data(), static_cast<std::size_t>(got));
  const auto dropped = std::min<std::uint64_t>(to_drop_, come.size());
  come.remove_prefix(dropped);
  to_drop_ -= dropped;
  buffered_ += come;
  return true;
}

std::optional<std::string> Connection::exactly(std::size_t bytes) {
  while (buffered_.size() < bytes) {
    if (!fill(patience)) {
      ended_ = true;
      return {};
    }
  }
  auto taken = buffered_.substr(0, bytes);
  buffered_.erase(0, bytes);
  return taken;
}

std::optional<Connection::Incoming> Connection::read(std::chrono::milliseconds limit) {
  while (buffered_.size() < header_bytes) {
    if (!fill(limit)) return {};
  }
  Incoming frame;
  frame.header = header_of(buffered_);
  while (buffered_.size() < header_bytes + frame.header.length) {
    if (!fill(patience)) return {};
  }
  frame.body = buffered_.substr(header_bytes, frame.header.length);
  buffered_.erase(0, header_bytes + frame.header.length);
  const auto here = std::min<std::uint64_t>(frame.header.trailing, buffered_.size());
  buffered_.erase(0, here);
  to_drop_ = frame.header.trailing - here;
  for (int i = 0; i < frame.header.descriptors && !received_.empty(); ++i) {
    frame.descriptors.push_back(std::move(received_.front()));
    received_.pop_front();
  }
  return frame;
}

}  // namespace hostile
