#include "base/foreign_descriptor.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <utility>

#include "base/background.h"
#include "base/per_process.h"

namespace tensorferry::foreign_descriptor {
namespace {

constexpr int most_waiting = 64;

struct Closer {
  std::atomic<int> waiting{0};
  Background thread;
};

/// Never destroyed, because its thread may hang in close() when the process ends.
Closer& closer() {
  static auto& each = *new PerProcess<Closer>();
  return each.get();
}

}  // namespace

bool closes_at_once(int fd) noexcept {
  if (::fcntl(fd, F_GET_SEALS) >= 0) return true;
  struct statx file {};
  // Without AT_STATX_DONT_SYNC the kernel would ask the file's server.
  if (::statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &file) != 0) return false;
  const auto type = file.stx_mode & S_IFMT;
  return type == 0 || type == S_IFCHR || type == S_IFIFO;  // 0: an anonymous inode, as dma-buf has
}

void close_apart(FileDescriptor fd) {
  auto& all = closer();
  ++all.waiting;
  all.thread.submit([&all, closed = std::move(fd)]() mutable {
    closed.reset();
    --all.waiting;
  });
}

bool may_receive() noexcept { return closer().waiting < most_waiting; }

}  // namespace tensorferry::foreign_descriptor
