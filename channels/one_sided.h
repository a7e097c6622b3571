/// One-sided transfers: a process reads and writes memory of its peer, and no thread of the peer takes part.
#pragma once

#include <cstdint>
#include <functional>
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

  /// Makes what peers had written when it is called visible to the work of the device that the memory is on. The
  /// completion gets the outcome, inside the call or on a thread of the channel.
  using Flush = std::function<void(Completion)>;
  /// Returns what does so for this memory, and does not keep it exposed. Empty: nothing has to be done.
  [[nodiscard]] virtual Flush flush() const { return {}; }
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
/// Memory is the host's, or that of the pair's local device. It does not matter on which device the peer's is: its keys
/// tell the cards all. Nothing is ordered by streams. `done` of a transfer means that the bytes are visible:
///
/// - of a read: to the device on which they have landed;
/// - of a write to the host's memory: to the peer's processors;
/// - of a write to a device's memory: to reads by cards. The device's own work may see older bytes until the peer has
///   flushed (ExposedMemory::flush), and nothing else promises when they appear. So a writer tells the peer, and the
///   peer flushes before its program learns of it.
///
/// Thread-safe. Errors reach completions. It may outlive its channel: transfers then fail with ChannelUnavailable.
class OneSided {
 public:
  virtual ~OneSided() = default;

  /// Lets the peer reach `memory`, and returns what the peer has to know for that (Transfer::there, ::word). `exposed`
  /// is null, or what an earlier call for the same memory and rights has made, for this peer or another one. It is
  /// extended or replaced. Blocks while pages are pinned, up to some milliseconds for 100 MB. The caller keeps the
  /// memory allocated until it has dropped `exposed`: memory that is freed before, by cudaFree for instance, stays
  /// pinned, and peers reach it until then.
  ///
  /// ChannelUnavailable: this channel cannot, or not now; ResourceExhausted: no more memory may be pinned.
  virtual Result<Bytes> expose(const Buffer& memory, ExposedRights rights, std::shared_ptr<ExposedMemory>& exposed) = 0;

  /// Copies equal runs of the peer's memory into memory of this process, or back. Reads a word of the peer's before,
  /// and when all the bytes are there: if it has another value, the copied bytes count for nothing.
  struct Transfer {
    Bytes there;                           // from the peer's expose()
    std::uint64_t run_bytes = 0;           // at most most_run_bytes
    std::vector<std::uint64_t> offsets{};  // of the runs there
    Buffer here;                           // the runs, one after another; no work of a device uses it
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
