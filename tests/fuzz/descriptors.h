/// Sends file descriptors with bytes, as a hostile peer may.
#pragma once

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <array>
#include <cstring>

#include "base/bytes.h"
#include "base/file_descriptor.h"

namespace tensorferry::fuzzing {

inline const FileDescriptor something(::eventfd(0, EFD_CLOEXEC));  // opened before a fuzzer counts descriptors

/// Sends `bytes`, with up to 64 descriptors at the first byte. Returns the result of sendmsg(). Never waits.
inline ssize_t send_with_descriptors(int fd, ByteView bytes, std::size_t descriptors) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * 64)> ancillary{};
  iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (descriptors != 0) {
    message.msg_control = ancillary.data();
    message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors);
    auto* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors);
    for (std::size_t i = 0; i < descriptors; ++i) {
      const int sent = something.get();
      std::memcpy(CMSG_DATA(header) + i * sizeof sent, &sent, sizeof sent);
    }
  }
  return ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace tensorferry::fuzzing
