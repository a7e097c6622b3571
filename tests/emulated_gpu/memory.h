/// The memory of the emulated devices. It is shared memory of the host, so that another process can map it too.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace emulated {

inline constexpr std::size_t device_bytes = std::size_t{8} << 30;  // of each device

/// Memory of one memfd on one device. Owns `descriptor`. The kernel frees the memory when no process has a mapping or
/// descriptor of it any more.
struct Pages {
  Pages(int f, std::size_t b, int d) : descriptor(f), bytes(b), device(d) {}
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  const int descriptor;
  const std::size_t bytes;
  const int device;                       // as the driver numbers all devices, not only those of this process
  std::atomic<unsigned int> handles{1U};  // the types of handles that can export it (CUmemAllocationHandleType)
};
using PagesPtr = std::shared_ptr<Pages>;

/// Pages that are mapped at an address.
struct Range {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  std::uint64_t id = 0;  // identifies this mapping, and is never reused
  PagesPtr pages;
  /// True: allocated as by cudaMalloc, or opened by an IPC handle. False: mapped at reserved addresses.
  bool allocated = false;
  /// The devices that may access it, as bits. Peer access adds devices to allocated memory alone.
  std::uint32_t access = 0;
};

/// All emulated memory of this process. Thread-safe. Functions return null, nullopt or false if they fail.
class Memory {
 public:
  static Memory& of_this_process();

  /// Creates pages. Fails if the device would then have more than `device_bytes`.
  PagesPtr create(std::size_t bytes, int device);
  /// Returns the pages of a descriptor from this process or another one, and takes over the descriptor. Two descriptors
  /// of the same memory give the same Pages.
  PagesPtr import(int descriptor);

  /// Maps all pages at addresses that the kernel chooses, as allocated memory that `device` may access.
  std::optional<std::uintptr_t> map(const PagesPtr& pages, int device);
  /// Maps the first `bytes` bytes of `pages` at reserved addresses. No device may access them yet.
  bool map_at(std::uintptr_t begin, std::size_t bytes, const PagesPtr& pages);
  /// Ends the mapping that begins at `begin`. Addresses of allocated memory are freed; others stay reserved.
  bool unmap(std::uintptr_t begin);
  /// Returns the mapping that contains `address`.
  std::optional<Range> find(std::uintptr_t address);
  /// Lets `device` access mapped memory. Fails if there is none, or if it does not end at `begin + bytes`.
  bool grant(std::uintptr_t begin, std::size_t bytes, int device);
  /// Returns the bytes of all pages of a device that this process has.
  std::size_t used(int device);

  /// Records host memory as page-locked, or no longer so.
  void lock(std::uintptr_t begin, std::size_t bytes);
  bool unlock(std::uintptr_t begin);
  /// Returns whether `address` is neither device memory nor page-locked. A copy from or to pageable memory has finished
  /// with it when the call returns.
  bool pageable(std::uintptr_t address);

  std::uint64_t add_handle(PagesPtr pages);
  PagesPtr handle(std::uint64_t handle);
  bool drop_handle(std::uint64_t handle);

 private:
  std::mutex mutex_;
  std::map<std::uintptr_t, Range> ranges_;
  std::map<std::uintptr_t, std::size_t> locked_;
  std::map<std::uint64_t, PagesPtr> handles_;
  std::map<std::uint64_t, std::weak_ptr<Pages>> known_;  // by the file's inode
  std::uint64_t next_ = 1;
};

}  // namespace emulated
