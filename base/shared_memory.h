/// Memory that several processes map: a memfd, which leaves no name in a file system. Its size is fixed, so that no
/// process can truncate it under the others: a read beyond the end of a file raises SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/file_descriptor.h"
#include "base/status.h"

namespace tensorferry {

/// A mapping, readable and (unless frozen) writable. If this process made the memory, the object also holds the
/// descriptor by which other processes map it. Movable, one owner; the destructor unmaps and closes. The memory itself
/// lives until the last process has unmapped it, also after a kill.
///
/// Another process that maps the memory may write it at any time. To check a value, take it out first (by an atomic
/// load, or a copy), then check it, and do not read the memory again.
class SharedMemory {
 public:
  /// What a child of fork() finds at the addresses:
  /// - `unmapped`: nothing. The child's destructors leave those addresses alone.
  /// - `inherited`: the same shared memory, for tensors that the child may go on reading.
  enum class InChild : std::uint8_t { unmapped, inherited };

  SharedMemory() noexcept = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = static_cast<SharedMemory&&>(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { unmap(); }

  /// Makes `bytes` bytes of zeros, sealed against shrinking and growing. Pages are taken at first touch.
  /// InvalidArgument for 0 bytes; ResourceExhausted if the system gives no descriptor or address space;
  /// ChannelUnavailable if it has no memfd or forbids it.
  static Result<SharedMemory> create(std::size_t bytes, InChild in_child = InChild::unmapped);

  /// Makes the same kind of memory, to be filled and then frozen. Until then no forked child has it mapped.
  static Result<SharedMemory> create_to_freeze(std::size_t bytes);
  /// Seals the memory so that no process can write it from then on, even one that has its descriptor (F_SEAL_WRITE).
  /// Its addresses stay the same and become read-only. After a failure the memory is not frozen, but the mapping may be
  /// read-only already.
  Status freeze();

  /// Maps memory whose descriptor a peer sent. ProtocolError if it is not a sealed memfd of `bytes` bytes that may be
  /// written; ResourceExhausted if there is no address space. The descriptor is closed either way.
  static Result<SharedMemory> map(FileDescriptor received, std::size_t bytes, InChild in_child = InChild::unmapped);

  /// Maps memory that a peer hands over and that may be frozen. If it is, the mapping is read-only and the object keeps
  /// the descriptor. A forked child inherits the mapping.
  static Result<SharedMemory> map_handed(FileDescriptor received, std::size_t bytes);

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::span<std::byte> span() const noexcept { return {data_, bytes_}; }
  explicit operator bool() const noexcept { return data_ != nullptr; }
  /// Returns whether the memory is frozen: its bytes cannot change.
  [[nodiscard]] bool frozen() const noexcept { return frozen_; }
  /// Maps all of a frozen memory at other addresses, which the returned owner may write. Pages are shared until then;
  /// each is copied at its first write. The mapping ends with its last owner and does not need this object.
  [[nodiscard]] Result<std::shared_ptr<std::byte>> copy_on_write() const;

  /// Returns a descriptor to send to another process. InvalidArgument if this object holds none: a peer sent the memory
  /// and it is not frozen, or `close_descriptor` was called. ResourceExhausted if the process has no descriptor left.
  [[nodiscard]] Result<FileDescriptor> share() const;
  /// Closes the descriptor. Processes that have mapped the memory keep it, and no other process can get it.
  void close_descriptor() noexcept { descriptor_.reset(); }

  /// Takes the pages of a range and enters them into this process's page tables; their content stays. May take long
  /// (about 0.6 s per GB of fresh pages). Returns false if not all pages could be taken.
  bool populate(std::size_t offset, std::size_t bytes) const noexcept;

 private:
  SharedMemory(FileDescriptor descriptor, std::byte* data, std::size_t bytes) noexcept;
  static Result<SharedMemory> map(FileDescriptor received, std::size_t bytes, InChild in_child, bool frozen);
  void unmap() noexcept;

  FileDescriptor descriptor_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::uint32_t mapped_in_ = 0;  // forks() of the process that mapped it
  InChild in_child_ = InChild::unmapped;
  bool frozen_ = false;
};

}  // namespace tensorferry
