/// Memory that several processes map: a memfd of fixed size, so that nothing lies about with a name and nobody can cut
/// it short under the others (a read behind the end of a file is a SIGBUS).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "channels/file_descriptor.h"
#include "channels/status.h"

namespace tensorferry {

/// A mapping, readable and writable, and where this process made it the descriptor that others map it by. Movable, one
/// owner; the destructor unmaps and closes. The memory itself lives until the last process has unmapped it, also after
/// a kill.
///
/// What another process maps it may write at any time: take out what must be checked (by atomics, or a copy), then
/// check it, and never look again.
class SharedMemory {
 public:
  /// What a child of fork() finds at the addresses: nothing (its destructors leave what is there alone), or the same
  /// shared memory, for tensors that the child may go on reading.
  enum class InChild : std::uint8_t { unmapped, inherited };

  SharedMemory() noexcept = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = static_cast<SharedMemory&&>(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { unmap(); }

  /// `bytes` (not 0) bytes of zeros, sealed against shrinking and growing. Pages are taken at first touch.
  /// ResourceExhausted where the system gives no descriptor or address space; ChannelUnavailable where it has no memfd
  /// or forbids it.
  static Result<SharedMemory> create(std::size_t bytes, InChild in_child = InChild::unmapped);

  /// The same, to be filled and then frozen; until then in no child.
  static Result<SharedMemory> create_to_freeze(std::size_t bytes);
  /// Nobody can write it any more, whoever has its descriptor (F_SEAL_WRITE). Its addresses stay, and can be read
  /// alone. A failure leaves it as it was.
  Status freeze();

  /// Maps what a peer sent. ProtocolError where it is not a sealed memfd of `bytes` bytes that may be written;
  /// ResourceExhausted where there is no address space. The descriptor is closed either way.
  static Result<SharedMemory> map(FileDescriptor received, std::size_t bytes, InChild in_child = InChild::unmapped);

  /// The same for memory that may be frozen: its addresses are then for reading, and its descriptor is kept.
  static Result<SharedMemory> map_handed(FileDescriptor received, std::size_t bytes);

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::span<std::byte> span() const noexcept { return {data_, bytes_}; }
  explicit operator bool() const noexcept { return data_ != nullptr; }
  /// The bytes never change.
  [[nodiscard]] bool frozen() const noexcept { return frozen_; }
  /// All of a frozen memory at addresses of its own, which its owner may write: pages are shared until then, and each
  /// is copied when it is first written. Ends with the last owner, and needs this object no more.
  [[nodiscard]] Result<std::shared_ptr<std::byte>> copy_on_write() const;

  /// A descriptor to send to another process. Fails where this process did not create the memory, after `seclude`, and
  /// with ResourceExhausted where there is none left.
  [[nodiscard]] Result<FileDescriptor> share() const;
  /// Closes the descriptor: those who have mapped the memory keep it, nobody else gets it.
  void seclude() noexcept { descriptor_.reset(); }

  /// Takes the pages of a range and enters them into this process's page tables; content stays. May take long (about
  /// 0.6 s a GB for fresh ones). False: not all could be had.
  bool populate(std::size_t offset, std::size_t bytes) const noexcept;

 private:
  SharedMemory(FileDescriptor descriptor, std::byte* data, std::size_t bytes) noexcept;
  static Result<SharedMemory> map(FileDescriptor received, std::size_t bytes, InChild in_child, bool frozen);
  void unmap() noexcept;

  FileDescriptor descriptor_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::uint32_t mapped_in_ = 0;  // which process: forks()
  InChild in_child_ = InChild::unmapped;
  bool frozen_ = false;
};

}  // namespace tensorferry
