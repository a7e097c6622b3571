#include "channels/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "channels/fork.h"
#include "channels/text.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3; a system may insist on it (vm.memfd_noexec)
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace tensorferry {

namespace {

constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr std::size_t page = 4096;
constexpr std::size_t huge_page = std::size_t{2} << 20;

/// `what` and why the last system call failed.
Status failure(std::string_view what) {
  const int error = errno;
  const bool scarce = error == ENOMEM || error == EMFILE || error == ENFILE || error == ENOSPC;
  return {scarce ? Code::resource_exhausted : Code::channel_unavailable,
          formatted("{}: {}", what, std::strerror(error))};
}

FileDescriptor make_memfd() {
  constexpr auto flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  FileDescriptor fd(::memfd_create("tensorferry", flags | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd = FileDescriptor(::memfd_create("tensorferry", flags));
  return fd;
}

std::byte* map_file(int fd, std::size_t bytes) {
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (bytes >= huge_page) ::madvise(mapped, bytes, MADV_HUGEPAGE);  // a system that has none for memfds says no
  return static_cast<std::byte*>(mapped);
}

/// Why `fd` must not be mapped as `bytes` bytes; null where it may.
const char* objection_to(int fd, std::size_t bytes) {
  struct statfs system {};
  // Huge pages of hugetlbfs can be taken away under a mapping, and other files can be anything.
  if (::fstatfs(fd, &system) != 0 || system.f_type != TMPFS_MAGIC) return "is not a memfd";
  const int has = ::fcntl(fd, F_GET_SEALS);
  if (has < 0 || (has & seals) != seals) return "is not sealed against a change of its size";
  struct stat file {};
  if (::fstat(fd, &file) != 0 || file.st_size < 0 || static_cast<std::size_t>(file.st_size) != bytes) {
    return "has another size than announced";
  }
  return nullptr;
}

}  // namespace

SharedMemory::SharedMemory(FileDescriptor descriptor, std::byte* data, std::size_t bytes) noexcept
    : descriptor_(std::move(descriptor)), data_(data), bytes_(bytes), mapped_in_(forks()) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this == &other) return *this;
  unmap();
  descriptor_ = std::move(other.descriptor_);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  mapped_in_ = other.mapped_in_;
  in_child_ = other.in_child_;
  return *this;
}

void SharedMemory::unmap() noexcept {
  // A child has nothing of ours there, and may have something else by now.
  const bool ours = mapped_in_ == forks() || in_child_ == InChild::inherited;
  if (data_ != nullptr && ours) ::munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
  descriptor_.reset();
}

Result<SharedMemory> SharedMemory::create(std::size_t bytes, InChild in_child) {
  if (bytes == 0 || bytes > std::numeric_limits<std::int64_t>::max()) {
    return Status(Code::invalid_argument, formatted("there is no shared memory of {} bytes", bytes));
  }
  auto fd = make_memfd();
  if (!fd) return failure("no memfd");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return failure("no memfd of this size");
  if (::fcntl(fd.get(), F_ADD_SEALS, seals) != 0) return failure("a memfd cannot be sealed");
  auto* const data = map_file(fd.get(), bytes);
  if (data == nullptr) return failure("a memfd cannot be mapped");
  SharedMemory memory(std::move(fd), data, bytes);
  memory.in_child_ = in_child;
  if (in_child == InChild::unmapped) ::madvise(data, bytes, MADV_DONTFORK);
  return memory;
}

Result<SharedMemory> SharedMemory::map(FileDescriptor received, std::size_t bytes, InChild in_child) {
  const auto* objection = bytes == 0 ? "has no bytes" : objection_to(received.get(), bytes);
  if (objection != nullptr) {
    return Status(Code::protocol_error, formatted("shared memory of {} bytes {}", bytes, objection));
  }
  auto* const data = map_file(received.get(), bytes);
  if (data == nullptr) {
    if (errno == ENOMEM || errno == ENFILE) return failure("shared memory cannot be mapped");
    return Status(Code::protocol_error,
                  formatted("shared memory of {} bytes cannot be mapped: {}", bytes, std::strerror(errno)));
  }
  SharedMemory memory({}, data, bytes);
  memory.in_child_ = in_child;
  if (in_child == InChild::unmapped) ::madvise(data, bytes, MADV_DONTFORK);
  return memory;
}

Result<FileDescriptor> SharedMemory::share() const {
  if (!descriptor_) return Status(Code::invalid_argument, "this memory is not to be shared further");
  FileDescriptor copy(::fcntl(descriptor_.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy) return failure("no descriptor to share memory by");
  return copy;
}

bool SharedMemory::populate(std::size_t offset, std::size_t bytes) const noexcept {
  const auto begin = offset / page * page;
  if (::madvise(data_ + begin, offset + bytes - begin, MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
  // An older kernel. Others may be writing there: a page is touched by an addition of nothing.
  for (auto at = begin; at < offset + bytes; at += page) {
    std::atomic_ref(*reinterpret_cast<std::uint8_t*>(data_ + at)).fetch_add(0, std::memory_order_relaxed);
  }
  return true;
}

}  // namespace tensorferry
