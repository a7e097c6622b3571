#include "base/shared_memory.h"

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

#include "base/fork.h"
#include "base/text.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3; a system may insist on it (vm.memfd_noexec)
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace tensorferry {

namespace {

constexpr int size_seals = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr int seals = size_seals | F_SEAL_SEAL;
constexpr std::size_t page = 4096;
constexpr std::size_t huge_page = std::size_t{2} << 20;

/// Returns a status with `what` and the reason why the last system call failed.
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
  if (bytes >= huge_page) ::madvise(mapped, bytes, MADV_HUGEPAGE);  // fails harmlessly if memfds have no huge pages
  return static_cast<std::byte*>(mapped);
}

/// Maps memory that is frozen or about to be, privately. If `where` is not null, this replaces the mapping there.
std::byte* map_frozen(void* where, int fd, std::size_t bytes, int protection) {
  const int fixed = where != nullptr ? MAP_FIXED : 0;
  void* const mapped = ::mmap(where, bytes, protection, MAP_PRIVATE | MAP_NORESERVE | fixed, fd, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapped);
}

/// Makes a memfd of this size with these seals. If it fails, `failed` gives the reason.
FileDescriptor make_sealed(std::size_t bytes, int with, Status& failed) {
  if (bytes == 0 || bytes > std::numeric_limits<std::int64_t>::max()) {
    failed = Status(Code::invalid_argument, formatted("there is no shared memory of {} bytes", bytes));
    return {};
  }
  auto fd = make_memfd();
  if (!fd) {
    failed = failure("no memfd");
  } else if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    failed = failure("no memfd of this size");
  } else if (::fcntl(fd.get(), F_ADD_SEALS, with) != 0) {
    failed = failure("a memfd cannot be sealed");
  } else {
    return fd;
  }
  return {};
}

/// Returns why `fd` must not be mapped as `bytes` bytes; null if it may be.
const char* objection_to(int fd, std::size_t bytes) {
  // First, because only memory has seals. fstatfs() asks the server of a FUSE or NFS file, which a hostile peer may be.
  const int has = ::fcntl(fd, F_GET_SEALS);
  if (has < 0) return "is not a memfd";
  struct statfs system {};
  // Pages of hugetlbfs can be taken away under a mapping, and other files guarantee nothing.
  if (::fstatfs(fd, &system) != 0 || system.f_type != TMPFS_MAGIC) return "is not a memfd";
  if ((has & seals) != seals) return "is not sealed against a change of its size";
  struct stat file {};
  if (::fstat(fd, &file) != 0 || file.st_size < 0 || static_cast<std::size_t>(file.st_size) != bytes) {
    return "has another size than was announced";
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
  frozen_ = std::exchange(other.frozen_, false);
  return *this;
}

void SharedMemory::unmap() noexcept {
  // In a forked child the addresses are unmapped, or hold another mapping by now.
  const bool ours = mapped_in_ == forks() || in_child_ == InChild::inherited;
  if (data_ != nullptr && ours) ::munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
  descriptor_.reset();
}

Result<SharedMemory> SharedMemory::create(std::size_t bytes, InChild in_child) {
  Status failed;
  auto fd = make_sealed(bytes, seals, failed);
  if (!fd) return failed;
  auto* const data = map_file(fd.get(), bytes);
  if (data == nullptr) return failure("a memfd cannot be mapped");
  SharedMemory memory(std::move(fd), data, bytes);
  memory.in_child_ = in_child;
  if (in_child == InChild::unmapped) ::madvise(data, bytes, MADV_DONTFORK);
  return memory;
}

Result<SharedMemory> SharedMemory::create_to_freeze(std::size_t bytes) {
  Status failed;
  auto fd = make_sealed(bytes, size_seals, failed);
  if (!fd) return failed;
  auto* const data = map_file(fd.get(), bytes);
  if (data == nullptr) return failure("a memfd cannot be mapped");
  SharedMemory memory(std::move(fd), data, bytes);
  ::madvise(data, bytes, MADV_DONTFORK);  // a child's mapping would prevent the seal
  return memory;
}

Status SharedMemory::freeze() {
  // The kernel refuses the seal while any process could write through a mapping. This replaces our mapping in one step.
  if (map_frozen(data_, descriptor_.get(), bytes_, PROT_READ) == nullptr)
    return failure("a memfd cannot be mapped anew");
  in_child_ = InChild::inherited;
  if (::fcntl(descriptor_.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SEAL) != 0) {
    return failure("a memfd cannot be sealed against writing");
  }
  frozen_ = true;
  return {};
}

Result<std::shared_ptr<std::byte>> SharedMemory::copy_on_write() const {
  auto* const data = map_frozen(nullptr, descriptor_.get(), bytes_, PROT_READ | PROT_WRITE);
  if (data == nullptr) return failure("shared memory cannot be mapped");
  return std::shared_ptr<std::byte>(data, [bytes = bytes_](std::byte* begin) { ::munmap(begin, bytes); });
}

Result<SharedMemory> SharedMemory::map(FileDescriptor received, std::size_t bytes, InChild in_child) {
  return map(std::move(received), bytes, in_child, false);
}

Result<SharedMemory> SharedMemory::map_handed(FileDescriptor received, std::size_t bytes) {
  const int has = ::fcntl(received.get(), F_GET_SEALS);
  return map(std::move(received), bytes, InChild::inherited, has >= 0 && (has & F_SEAL_WRITE) != 0);
}

Result<SharedMemory> SharedMemory::map(FileDescriptor received, std::size_t bytes, InChild in_child, bool frozen) {
  const auto* objection = bytes == 0 ? "has no bytes" : objection_to(received.get(), bytes);
  if (objection != nullptr) {
    return Status(Code::protocol_error, formatted("shared memory of {} bytes {}", bytes, objection));
  }
  auto* const data = frozen ? map_frozen(nullptr, received.get(), bytes, PROT_READ) : map_file(received.get(), bytes);
  if (data == nullptr) {
    if (errno == ENOMEM || errno == ENFILE) return failure("shared memory cannot be mapped");
    return Status(Code::protocol_error,
                  formatted("shared memory of {} bytes cannot be mapped: {}", bytes, std::strerror(errno)));
  }
  SharedMemory memory(frozen ? std::move(received) : FileDescriptor(), data, bytes);
  memory.in_child_ = in_child;
  memory.frozen_ = frozen;
  if (in_child == InChild::unmapped) ::madvise(data, bytes, MADV_DONTFORK);
  return memory;
}

Result<FileDescriptor> SharedMemory::share() const {
  if (!descriptor_) return Status(Code::invalid_argument, "this memory may not be shared further");
  FileDescriptor copy(::fcntl(descriptor_.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy) return failure("no file descriptor is left to share memory");
  return copy;
}

bool SharedMemory::populate(std::size_t offset, std::size_t bytes) const noexcept {
  const auto begin = offset / page * page;
  if (::madvise(data_ + begin, offset + bytes - begin, MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
  // An older kernel: touches each page by an atomic addition of 0, because other processes may be writing there.
  for (auto at = begin; at < offset + bytes; at += page) {
    std::atomic_ref(*reinterpret_cast<std::uint8_t*>(data_ + at)).fetch_add(0, std::memory_order_relaxed);
  }
  return true;
}

}  // namespace tensorferry
