/// The memory of the emulated devices: shared memory, so that another process may have it as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace emulated {

inline constexpr std::size_t device_bytes = std::size_t{8} << 30;

/// Pages, which go with the last mapping, handle and descriptor.
struct Pages {
  Pages(int f, std::size_t b) : descriptor(f), bytes(b) {}
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  const int descriptor;
  const std::size_t bytes;
};
using PagesPtr = std::shared_ptr<Pages>;

/// Pages at an address.
struct Range {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  std::uint64_t id = 0;  // of this mapping, never used again
  PagesPtr pages;
  bool allocated = false;  // by the way of cudaMalloc; else mapped into a reservation
};

/// All of the process. Thread-safe. Null and nullopt: it cannot be.
class Memory {
 public:
  static Memory& of_this_process();

  PagesPtr create(std::size_t bytes);
  /// Pages of another process's, or of this one's, which are then the same. Takes the descriptor.
  PagesPtr import(int descriptor);

  std::optional<std::uintptr_t> map(const PagesPtr& pages, bool allocated);
  bool map_at(std::uintptr_t begin, std::size_t bytes, const PagesPtr& pages);
  /// Leaves a hole in its reservation; frees the addresses of what was allocated.
  bool unmap(std::uintptr_t begin);
  std::optional<Range> find(std::uintptr_t address);
  /// Of all pages that there are.
  std::size_t used();

  /// Page-locked memory of the host.
  void lock(std::uintptr_t begin, std::size_t bytes);
  bool unlock(std::uintptr_t begin);
  /// Neither of a device nor page-locked: copies do not leave it alone behind their caller's back.
  bool pageable(std::uintptr_t address);

  std::uint64_t add_handle(PagesPtr pages);
  PagesPtr handle(std::uint64_t handle);
  bool drop_handle(std::uint64_t handle);

 private:
  std::mutex mutex_;
  std::map<std::uintptr_t, Range> ranges_;
  std::map<std::uintptr_t, std::size_t> locked_;
  std::map<std::uint64_t, PagesPtr> handles_;
  std::map<std::uint64_t, std::weak_ptr<Pages>> known_;  // by the system's number of the file
  std::uint64_t next_ = 1;
};

}  // namespace emulated
