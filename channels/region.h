/// Memory of this process's that its owner may hand over to peers without a copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "channels/buffer.h"
#include "channels/function.h"
#include "channels/shared_memory.h"

namespace tensorferry {

class Regions;

/// What has told peers of regions, and tells them of the end.
class RegionUser {
 public:
  /// The region `id` has ended. On whatever thread dropped it, with no lock held; never in a forked child.
  virtual void gone(std::uint64_t id) noexcept = 0;

 protected:
  ~RegionUser() = default;
};

/// One piece of it, a memfd of its own: who is handed one sees no neighbours. It is never used for anything else again,
/// for a peer that was handed it may look on. Ends with its last owner here; peers keep what they hold.
///
/// Belongs to no agent, link or channel: any channel that maps memory into other processes may hand it to any number of
/// peers, each of which maps it once.
class Region final {
 public:
  Region(SharedMemory memory, std::uint64_t id, Regions& regions);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  [[nodiscard]] const SharedMemory& memory() const { return memory_; }
  /// Not used again in this process.
  [[nodiscard]] std::uint64_t id() const { return id_; }
  void tell_when_gone(std::weak_ptr<RegionUser> user);

 private:
  const SharedMemory memory_;
  const std::uint64_t id_;
  Regions& regions_;
  const std::uint32_t born_in_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<RegionUser>> told_;
};

/// All regions of the process, by address: memory is made before there is an agent, and outlives it. Thread-safe.
class Regions final {
 public:
  /// A forked child has none to begin with: those of its parent are the parent's to hand over.
  static Regions& of_this_process();

  /// Zeros, at a page, owned by the buffer; pages are taken at first touch. A region holds a descriptor.
  /// InvalidArgument for 0 bytes; ResourceExhausted and ChannelUnavailable as SharedMemory::create.
  Result<Buffer> make(std::size_t bytes);

  /// A region that nobody writes any more once `fill` has written all of it: those who are handed it may write what
  /// they map, each for itself (Sharing::frozen). Its bytes can be read here.
  Result<Buffer> make_frozen(std::size_t bytes, UniqueFunction<void(std::byte*)> fill);

  struct Found {
    std::shared_ptr<Region> region;
    std::size_t offset;
  };
  /// The region that all of these bytes (not 0) lie in.
  std::optional<Found> find(const std::byte* data, std::size_t bytes);

 private:
  friend class Region;
  Buffer keep(SharedMemory memory, std::size_t bytes);
  void remove(const std::byte* begin);

  std::mutex mutex_;
  std::uint64_t last_id_ = 0;
  std::map<const std::byte*, std::weak_ptr<Region>> by_begin_;
};

}  // namespace tensorferry
