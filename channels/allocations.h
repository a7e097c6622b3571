/// The memory of this process whose end TensorFerry learns of. For such memory a channel may keep what is costly to
/// make, such as a registration with a network card or a handle at a peer, for longer than one transfer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "channels/buffer.h"

namespace tensorferry {

/// Told of the end of allocations. A channel implements it if it keeps something for an allocation.
class AllocationUser {
 public:
  /// Runs when the program has announced memory (Allocations::hold), which stays allocated meanwhile. May block.
  virtual void held(std::byte* base, std::size_t bytes) noexcept { (void)base, (void)bytes; }
  /// Runs just before the memory of `generation` goes back to the system or to its owner, on the thread that gives it
  /// back, with no lock held. When it returns, nothing that this user keeps leads to the memory any more. Never runs in
  /// a forked child.
  ///
  /// For a device's memory it runs up to a second later, on a thread that may wait for the driver. Until then the
  /// driver keeps the memory for what this user has made of it.
  virtual void gone(std::uint64_t generation) noexcept = 0;

 protected:
  ~AllocationUser() = default;
};

/// Holds the known allocations of the process, by address. Each has a generation, a number that no other allocation of
/// this process ever has. So a channel that keeps something under a generation never applies it to later memory at the
/// same address.
///
/// A device's memory is here from the time that a channel has asked the device's driver about it (`find_on_device`).
///
/// Host memory of other allocators (malloc, torch) is not here, because nothing says when it is freed. A program
/// announces such memory itself while it keeps it (`hold`).
///
/// It belongs to the process, because memory outlives agents. A forked child begins with none. Thread-safe.
class Allocations final {
 public:
  /// Who reads and writes the memory.
  enum class Kind : std::uint8_t {
    receives,  // a block of a receive pool, which holds buffers of many peers, one after another
    offers,    // memory that its owner made or announced to be sent: peers may read it as long as it exists
  };
  struct Allocation {
    std::byte* base = nullptr;
    std::size_t bytes = 0;
    std::uint64_t generation = 0;
    Kind kind = Kind::receives;
  };

  static Allocations& of_this_process();

  /// Adds an allocation and returns its generation. It overlaps no other allocation that was added and not removed.
  std::uint64_t add(std::byte* base, std::size_t bytes, Kind kind);
  /// Tells the users, then returns; the caller then frees the memory.
  void remove(std::byte* base, std::uint64_t generation) noexcept;

  /// Announces memory that another allocator made, of kind `offers`, and tells the users. `owner` keeps it allocated.
  /// The result holds the owner; when its last copy is dropped, the users are told, and then the owner is dropped. The
  /// memory may overlap other allocations.
  std::shared_ptr<void> hold(std::byte* base, std::size_t bytes, Owner owner);

  /// Returns the allocation that contains all of these bytes (not 0), of kind `offers` if there are several; nullopt if
  /// none is known.
  std::optional<Allocation> find(const std::byte* data, std::size_t bytes) const;

  /// Returns the allocation of a device's memory, of kind `offers`. `pieces` are the numbers by which the driver tells
  /// its physical pieces, in order; it gives no number twice. If other pieces were at these addresses before, that
  /// allocation has ended, and the users are told first. Call it with no lock that a user needs.
  Allocation find_on_device(std::byte* base, std::size_t bytes, std::span<const std::uint64_t> pieces);
  /// The device's allocator gives back this memory: ends the allocations that overlap it, and tells the users.
  void invalidate_on_device(const std::byte* base, std::size_t bytes) noexcept;

  /// Returns whether the allocation has not ended.
  bool exists(const Allocation& allocation) const;

  /// Makes the end of each allocation known to `user`, as long as it exists.
  void tell(std::weak_ptr<AllocationUser> user);

 private:
  class Held;
  struct OnDevice {
    Allocation allocation;
    std::vector<std::uint64_t> pieces;
  };

  void tell_gone(const std::vector<OnDevice>& ended) const noexcept;
  std::vector<std::shared_ptr<AllocationUser>> users() const;

  mutable Mutex mutex_;
  std::map<const std::byte*, Allocation> by_base_;
  std::vector<Allocation> held_;  // few: searched one by one
  std::multimap<const std::byte*, OnDevice>
      on_device_;  // by base; a range of several pieces begins where one of them does
  std::vector<std::weak_ptr<AllocationUser>> users_;
};

}  // namespace tensorferry
