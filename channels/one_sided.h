/// One-sided transfers: a process reads and writes memory of its peer, and no thread of the peer takes part.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "channels/buffer.h"

namespace tensorferry {

/// Memory of this process that peers may reach, as a channel has prepared it. When it is destroyed, all keys to it are
/// invalid: no peer reaches the memory by them any more, also by a transfer under way.
class ExposedMemory {
 public:
  virtual ~ExposedMemory() = default;
};

/// What peers may do with exposed memory.
struct ExposedRights {
  bool read = true;
  bool write = false;
};

/// The one-sided transfers of one pair of devices on a link (Channel::one_sided).
///
/// The peer's card checks bounds and rights: by the keys of an exposure, its bytes are reached in the ways that its
/// rights allow, and no others. A transfer that breaks them fails, and harms the connection of this link alone, which
/// is then made anew.
///
/// Thread-safe. Errors reach completions. It may outlive its channel: transfers then fail with ChannelUnavailable.
class OneSided {
 public:
  virtual ~OneSided() = default;

  /// Lets the peer reach `memory`, and returns what the peer has to know for that (Transfer::there, ::word). `exposed`
  /// is null, or what an earlier call for the same memory and rights has made, for this peer or another one. It is
  /// extended or replaced. Blocks while pages are pinned, up to some milliseconds for 100 MB. The caller keeps
  /// `memory.owner` until it has dropped `exposed`.
  ///
  /// ChannelUnavailable: this channel cannot, or not now; ResourceExhausted: no more memory may be pinned.
  virtual Result<Bytes> expose(const Buffer& memory, ExposedRights rights, std::shared_ptr<ExposedMemory>& exposed) = 0;

  /// Copies equal runs of the peer's memory into memory of this process, or back. Reads a word of the peer's before,
  /// and when all the bytes are there: if it has another value, the copied bytes count for nothing.
  struct Transfer {
    Bytes there;                           // from the peer's expose()
    std::uint64_t run_bytes = 0;           // at most most_run_bytes
    std::vector<std::uint64_t> offsets{};  // of the runs there
    Buffer here;                           // the runs, one after another
    bool writes = false;                   // from here to there
    Bytes word{};                          // from the peer's expose()
    std::uint64_t word_offset = 0;
    std::uint64_t expected = 0;
  };
  static constexpr std::uint64_t most_run_bytes = std::uint64_t{1} << 30;
  /// Begins a transfer. Adjacent runs are one read or write, and all of them are posted together. `done` runs once,
  /// when nothing touches `here` any more, with Ok, NotFound (the word had another value), or ChannelUnavailable (the
  /// transfer could not be done now, or failed: any part may have landed).
  virtual void transfer(Transfer transfer, Completion done) = 0;
  /// Runs the completions of transfers that have ended by now. Never waits.
  virtual void progress() = 0;
};

}  // namespace tensorferry
