/// The receiver's end of shared memory with one peer: what it has mapped, and who holds which block.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "channels/buffer.h"
#include "channels/shared_memory.h"
#include "channels/shm/layout.h"
#include "channels/status.h"

namespace tensorferry::shm {

/// Everything here is named by the peer, and nothing of it is believed: memory is mapped only where it cannot shrink, a
/// lending is checked against the segment's geometry, and a block that is held here is not given out a second time.
///
/// What was handed out keeps its mapping, and stays valid after the peer's death and close(). When its last owner lets
/// go the block is given back by writing into the shared memory; where this process has forked meanwhile, as one not to
/// be used again, because the child still sees it. An owner's end in a forked child gives nothing back. Thread-safe.
class Mappings final {
 public:
  /// The peer's ledger: maps it, reads the nonce and answers.
  Status map_ledger(FileDescriptor descriptor, std::uint64_t nonce);
  Status map(const Segment& segment, FileDescriptor descriptor);
  void drop(std::uint32_t slot);

  Status map(const Handover& handover, FileDescriptor descriptor);
  /// Forgets the region when the last of its tickets has come, which may take another way than this message.
  void gone(const Gone& gone);
  /// A ticket of the region has come and is not claimed.
  void skip(const Handed& handed);

  /// The lent bytes. ProtocolError where the peer cannot mean it; ResourceExhausted for memory that could not be
  /// mapped.
  Result<Buffer> claim(const Lending& lending, std::uint64_t bytes);
  /// The handed bytes; the region stays mapped as long as one of them is held. `shared`: the sender sees them too; else
  /// the region is frozen, and this is a mapping of its own, whose pages are copied when they are written.
  Result<Buffer> claim(const Handed& handed, std::uint64_t bytes, bool& shared);

  /// Unmaps what nobody holds.
  void close() noexcept;

 private:
  struct Mapping;
  struct Held;
  struct Place {
    std::shared_ptr<Mapping> mapping;  // null: it could not be mapped
  };

  struct Entry {
    std::shared_ptr<const SharedMemory> memory;  // null: not there yet, or it could not be mapped
    std::uint64_t tickets = 0;                   // that have come
    std::optional<std::uint64_t> last;           // of how many, once the sender has let go
  };
  using Regions = std::unordered_map<std::uint64_t, Entry>;

  Status keep(std::uint32_t slot, Result<SharedMemory> memory, Geometry geometry);
  std::shared_ptr<const SharedMemory> count(Regions::iterator region);
  Result<std::shared_ptr<Mapping>> find(std::uint32_t slot);

  std::mutex mutex_;
  bool closed_ = false;
  std::shared_ptr<const SharedMemory> ledger_;
  std::unordered_map<std::uint32_t, Place> slots_;
  Regions regions_;
};

}  // namespace tensorferry::shm
