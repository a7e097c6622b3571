/// Descriptors that a peer has sent and no protocol of ours asks for. close() of a file may wait for its server (FUSE,
/// NFS), and close() of a socket for its other end (SO_LINGER). The peer may be either, so no thread that others need
/// closes them.
#pragma once

#include "base/file_descriptor.h"

namespace tensorferry::foreign_descriptor {

/// Returns whether close() returns at once: memory, GPU memory, pipes. Asks no file system.
[[nodiscard]] bool closes_at_once(int fd) noexcept;

/// Closes the descriptor on a thread of its own, after those that came before it. Returns at once.
void close_apart(FileDescriptor fd);

/// Returns false while 64 of them wait to be closed. Then receive none: the kernel drops what it does not hand out.
[[nodiscard]] bool may_receive() noexcept;

}  // namespace tensorferry::foreign_descriptor
