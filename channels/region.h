/// Regions: memory of this process that its owner may hand over to peers without a copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/function.h"
#include "base/mutex.h"
#include "base/shared_memory.h"
#include "channels/buffer.h"

namespace tensorferry {

class Regions;

/// Told of the end of regions. A channel that has handed regions over implements it, to tell its peers.
class RegionUser {
 public:
  /// Runs when the region `id` has ended, on the thread that dropped it, with no lock held; never in a forked child.
  virtual void gone(std::uint64_t id) noexcept = 0;

 protected:
  ~RegionUser() = default;
};

/// One region, a memfd of its own, so that a peer that maps it sees no neighbouring memory. The memory is never used
/// for anything else again, because a peer that was handed it may go on reading it. The region ends with its last owner
/// here; peers keep their mappings.
///
/// It belongs to no agent, link or channel. Any channel that maps memory into other processes may hand it to any number
/// of peers, each of which maps it once.
class Region final {
 public:
  Region(SharedMemory memory, std::uint64_t id, Regions& regions);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  [[nodiscard]] const SharedMemory& memory() const { return memory_; }
  /// Returns a number that is not used again in this process.
  [[nodiscard]] std::uint64_t id() const { return id_; }
  /// Returns a descriptor for a peer: SharedMemory::share(). InvalidArgument after close_descriptor().
  [[nodiscard]] Result<FileDescriptor> share();
  /// Closes the region's descriptor: peers that have mapped the region keep it, and no other peer can get it.
  void close_descriptor() noexcept;
  /// Makes the region call `user->gone` when it ends, if `user` still exists.
  void tell_when_gone(std::weak_ptr<RegionUser> user);

 private:
  SharedMemory memory_;
  const std::uint64_t id_;
  Regions& regions_;
  const std::uint32_t born_in_;
  const std::uint64_t generation_;  // in Allocations; 0: frozen memory, which is not there
  Mutex mutex_;
  std::vector<std::weak_ptr<RegionUser>> told_;
};

/// Holds all regions of the process, by address. It belongs to the process, because memory is made before there is an
/// agent and outlives it. Thread-safe.
class Regions final {
 public:
  /// Returns the regions of this process. A forked child begins with none: the parent's regions are the parent's to
  /// hand over.
  static Regions& of_this_process();

  /// Makes a region of zeros, page-aligned and owned by the buffer. Pages are taken at first touch. A region holds a
  /// descriptor. InvalidArgument for 0 bytes; ResourceExhausted and ChannelUnavailable as for SharedMemory::create.
  Result<Buffer> make(std::size_t bytes);

  /// Makes a region that no process can write after `fill` has written all of it. This process can then only read the
  /// bytes. A peer that is handed the region may write its own mapping, copy-on-write (Sharing::frozen). Errors are as
  /// for make().
  Result<Buffer> make_frozen(std::size_t bytes, UniqueFunction<void(std::byte*)> fill);

  struct Found {
    std::shared_ptr<Region> region;
    std::size_t offset;
  };
  /// Returns the region that contains all of these bytes (not 0), and their offset in it; nullopt if no region does.
  std::optional<Found> find(const std::byte* data, std::size_t bytes);

 private:
  friend class Region;
  Buffer keep(SharedMemory memory, std::size_t bytes);
  void remove(const std::byte* begin);

  Mutex mutex_;
  std::uint64_t last_id_ = 0;
  std::map<const std::byte*, std::weak_ptr<Region>> by_begin_;
};

}  // namespace tensorferry
