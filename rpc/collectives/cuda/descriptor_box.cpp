#include "rpc/collectives/cuda/descriptor_box.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/host.h"
#include "base/text.h"

namespace tensorferry::collectives::cuda {
namespace {

std::pair<::sockaddr_un, ::socklen_t> socket_address(const DescriptorBox::Address& box) {
  ::sockaddr_un out{};
  out.sun_family = AF_UNIX;
  const auto length = static_cast<std::size_t>(std::find(box.name.begin(), box.name.end(), '\0') - box.name.begin());
  std::memcpy(static_cast<char*>(out.sun_path) + 1, box.name.data(), length);
  return {out, static_cast<::socklen_t>(offsetof(::sockaddr_un, sun_path) + 1 + length)};
}

/// A datagram of one word, with room for one descriptor beside it.
struct Datagram {
  std::uint64_t word = 0;
  ::iovec bytes{&word, sizeof word};
  alignas(::cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> ancillary{};
  ::msghdr message{};

  Datagram() {
    message.msg_iov = &bytes;
    message.msg_iovlen = 1;
    message.msg_control = ancillary.data();
    message.msg_controllen = ancillary.size();
  }
  Datagram(const Datagram&) = delete;
  Datagram& operator=(const Datagram&) = delete;
};

/// Receives one datagram. Returns its descriptor if it has the word and exactly one; an empty one otherwise.
FileDescriptor receive(int socket, std::uint64_t word) {
  Datagram datagram;
  if (::recvmsg(socket, &datagram.message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != sizeof word) return {};
  FileDescriptor out;
  for (auto* each = CMSG_FIRSTHDR(&datagram.message); each != nullptr; each = CMSG_NXTHDR(&datagram.message, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    int descriptor = -1;  // there is room for one alone; the system closes the others
    std::memcpy(&descriptor, CMSG_DATA(each), sizeof descriptor);
    out = FileDescriptor(descriptor);
  }
  return datagram.word == word ? std::move(out) : FileDescriptor();
}

}  // namespace

Result<DescriptorBox> DescriptorBox::open() {
  DescriptorBox out;
  out.socket_ = FileDescriptor(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!out.socket_) {
    return Status(Code::resource_exhausted, formatted("a socket for descriptors: {}", std::strerror(errno)));
  }
  const auto name = formatted("tensorferry-{}-{}", hex(random_word()), hex(random_word()));
  name.copy(out.address_.name.data(), out.address_.name.size() - 1);
  out.address_.word = random_word();
  const auto [address, size] = socket_address(out.address_);
  if (::bind(out.socket_.get(), reinterpret_cast<const ::sockaddr*>(&address), size) != 0) {
    return Status(Code::resource_exhausted, formatted("a socket for descriptors: {}", std::strerror(errno)));
  }
  return out;
}

Result<FileDescriptor> DescriptorBox::take(std::chrono::steady_clock::time_point until) {
  for (bool over = false; !over;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count();
    over = left <= 0;
    ::pollfd waits{socket_.get(), POLLIN, 0};
    if (::poll(&waits, 1, static_cast<int>(std::max<std::int64_t>(0, left))) <= 0) continue;
    if (auto found = receive(socket_.get(), address_.word)) return found;
  }
  return Status(Code::channel_unavailable, "the other rank's descriptor has not come");
}

Status DescriptorBox::send(int descriptor, const Address& to) {
  const FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  auto [address, size] = socket_address(to);
  Datagram datagram;
  datagram.word = to.word;
  datagram.message.msg_name = &address;
  datagram.message.msg_namelen = size;
  auto* const header = CMSG_FIRSTHDR(&datagram.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof descriptor);
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  if (socket && ::sendmsg(socket.get(), &datagram.message, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof to.word) return {};
  return {Code::channel_unavailable, formatted("sending a descriptor to another rank: {}", std::strerror(errno))};
}

}  // namespace tensorferry::collectives::cuda
