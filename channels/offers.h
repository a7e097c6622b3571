/// The open offers of one channel end, with the sources that it keeps until the peer acknowledges them.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "base/mutex.h"
#include "base/status.h"
#include "channels/buffer.h"

namespace tensorferry {

/// Holds the open offers of one channel end. Thread-safe; runs completions with no lock held.
///
/// Life of an offer: the channel calls `add`. A thread of this process that copies the source calls `begin_copy` and
/// `end_copy`. The channel calls `end`. A source is never released during a copy: if its offer ends meanwhile,
/// `end_copy` runs `released`.
class Offers {
 public:
  /// Adds an offer and returns its number. After `close` it returns nullopt and drops `released` without running it.
  std::optional<std::uint64_t> add(Buffer buffer, Completion released, bool shared = false);

  /// Returns the source to copy, valid until `end_copy`. If `shared`, the caller takes over the memory with its owner.
  /// Fails with ProtocolError if `number` names no open offer of `bytes` bytes, or one whose copy began before. After
  /// `close` it fails with the status of `close`.
  struct OfferedMemory {
    Buffer buffer;
    bool shared;
  };
  Result<OfferedMemory> begin_copy(std::uint64_t number, std::uint64_t bytes);
  void end_copy(std::uint64_t number);

  /// Ends an offer; does nothing if there is none.
  void end(std::uint64_t number);
  /// Ends all offers with `status`; Ok counts as ConnectionLost. An offer that is being copied ends at `end_copy`.
  void close(Status status);

 private:
  struct Entry {
    Buffer buffer;
    Completion released;
    bool shared = false;
    enum { waiting, copying, copied } state = waiting;
    bool ended = false;
    Status status;
  };

  Mutex mutex_;
  std::uint64_t next_ = 1;
  std::unordered_map<std::uint64_t, Entry> entries_;
  std::optional<Status> closed_;
};

}  // namespace tensorferry
