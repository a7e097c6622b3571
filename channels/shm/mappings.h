/// The receiver's end of shared memory with one peer: maps the peer's memory, and tracks which blocks are held.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "base/mutex.h"
#include "base/shared_memory.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "channels/shm/layout.h"

namespace tensorferry::shm {

/// The segments and regions that one channel end has mapped. Thread-safe.
///
/// Trust: the peer names everything here, so this side checks it. It maps only memory that cannot shrink, checks each
/// lending against the segment's geometry, and never hands out a held block a second time.
///
/// Ownership: a claimed buffer keeps its mapping, and stays valid after the peer's death and after close(). When its
/// last owner drops it, this side returns the block to the sender by writing into the shared memory. If this process
/// has forked since the claim, it returns the block as spent, because the child still sees it. An owner that drops its
/// copy in a forked child returns nothing.
class Mappings final {
 public:
  /// Maps the peer's ledger, checks the nonce and writes the answer. Fails with ProtocolError if the ledger does not
  /// hold `nonce`, and as SharedMemory::map does.
  Status map_ledger(FileDescriptor descriptor, std::uint64_t nonce);
  /// Maps a segment as the new memory of its slot. If this fails, claims of the slot fail with ResourceExhausted. Does
  /// nothing without a ledger, or after close().
  Status map(const Segment& segment, FileDescriptor descriptor);
  /// Empties the slot. Its memory stays mapped while a block of it is held.
  void drop(std::uint32_t slot);

  /// Maps a region. If this fails, claims of the region fail with ResourceExhausted.
  Status map(const Handover& handover, FileDescriptor descriptor);
  /// Drops the region once the last of its tickets has come. Tickets may come after this message, because they may
  /// travel by a ring.
  void gone(const RegionEnded& gone);
  /// Counts a ticket of the region that the receiver discards.
  void skip(const Handed& handed);

  /// Returns the lent bytes. Fails with ProtocolError if the peer cannot have lent them, with ResourceExhausted if the
  /// memory could not be mapped, and with ConnectionLost after close().
  Result<Buffer> claim(const Lending& lending, std::uint64_t bytes);
  /// Counts a ticket of the region and returns its bytes. They stay mapped while the buffer has an owner. Sets `shared`
  /// to whether the sender sees the same bytes. If not, the region is frozen, and the buffer lies in a new mapping
  /// whose pages are copied on write. Fails as the other claim() does.
  Result<Buffer> claim(const Handed& handed, std::uint64_t bytes, bool& shared);

  /// Unmaps all memory that is not held. Held buffers keep theirs.
  void close() noexcept;

 private:
  struct Mapping;
  struct Held;
  struct MappedSlot {
    std::shared_ptr<Mapping> mapping;  // null: mapping failed
  };

  struct Entry {
    std::shared_ptr<const SharedMemory> memory;  // null: not mapped yet, or mapping failed
    std::uint64_t tickets = 0;                   // how many have come
    std::optional<std::uint64_t> last;           // how many were sent; set when the sender's region has ended
  };
  using Regions = std::unordered_map<std::uint64_t, Entry>;

  Status keep(std::uint32_t slot, Result<SharedMemory> memory, Geometry geometry);
  std::shared_ptr<const SharedMemory> count(Regions::iterator region);
  Result<std::shared_ptr<Mapping>> find(std::uint32_t slot);

  Mutex mutex_;
  bool closed_ = false;
  std::shared_ptr<const SharedMemory> ledger_;
  std::unordered_map<std::uint32_t, MappedSlot> slots_;
  Regions regions_;
};

}  // namespace tensorferry::shm
