/// The buffers that a cuda_basic channel carries, and the queue of one direction that cuts them into chunks.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "channels/buffer.h"
#include "channels/cuda/device.h"

namespace tensorferry::cuda_basic {

enum class Direction : std::uint8_t { out, in };

inline constexpr std::size_t most_chunk_bytes = std::size_t{4} << 20;

/// Returns the size of each chunk of a buffer except the last, which may be shorter.
///
/// The end of each chunk costs the copy engines about 3 us (H200), so few chunks are better. But the receiver's GPU
/// lags the sender's by one chunk, so small chunks are better. The best size is about the square root of the buffer's
/// size times the bytes that an engine copies in 3 us; a sixteenth of the buffer, within bounds, is near enough.
constexpr std::size_t chunk_bytes(std::size_t buffer) {
  constexpr std::size_t page = 4096, least = std::size_t{1} << 20;
  return std::clamp(buffer / 16 / page * page, least, most_chunk_bytes);
}
/// Returns how many chunks the bytes of a buffer behind the first `begun` make.
constexpr std::uint64_t chunks_of(std::size_t buffer, std::size_t begun = 0) {
  const auto left = buffer - begun, each = chunk_bytes(buffer);
  return left / each + (left % each != 0 ? 1 : 0);
}

/// A buffer to send or receive; never an empty one.
struct Transfer {
  Buffer memory;         // null data (receiver only): the bytes are dropped
  cuda::GpuEvent ready;  // the memory may be read or written after this event; empty: now
  Completion landed;     // when receiving: the bytes are usable in the order of the memory's stream
  Completion done;       // the memory is no longer read or written
  bool carried = false;  // its chunks go by CarriedChunks

  /// Runs the completions that have not run. Call with no lock held.
  void finish(const Status& status);
};

/// A transfer and its progress. The flow calls `finish` once, when the transfer is over.
struct Driven {
  explicit Driven(Transfer t) : transfer(std::move(t)) {}

  Transfer transfer;
  std::size_t begun = 0;    // bytes in chunks that have begun
  std::size_t pending = 0;  // chunks that have begun and not ended
  bool diverted = false;    // `transfer` is into host memory, although the flow is a GPU's (Detour)
  Status status;
  std::optional<std::chrono::steady_clock::time_point> due_since;    // if it has waited for its memory
  std::optional<std::chrono::steady_clock::time_point> first_ended;  // the end of the first chunk, if timed

  [[nodiscard]] std::size_t bytes() const { return transfer.memory.bytes; }
  /// Returns how many chunks have not begun.
  [[nodiscard]] std::uint64_t chunks_left() const { return chunks_of(bytes(), begun); }
  /// Returns whether further chunks are copied; if not, their bytes are dropped.
  [[nodiscard]] bool copies() const { return transfer.memory.data != nullptr && status.ok(); }
  [[nodiscard]] bool over() const { return pending == 0 && begun == bytes(); }
  void fail(const Status& error) {
    if (status.ok()) status = error;
  }
  /// Runs the completions that have not run. Call with no lock held.
  void finish() { transfer.finish(status); }
};
using DrivenPtr = std::shared_ptr<Driven>;
/// Finishes each of `over`. Call with no lock held.
void finish(const std::vector<DrivenPtr>& over);

/// The transfers of one direction that have not begun all their chunks, ordered by chunk number. The sender numbers the
/// chunks consecutively over all transfers. The receiver learns of transfers in any order, but begins chunks strictly
/// in the order of their numbers. Not thread-safe: the flow's lock guards it.
class Queue {
 public:
  /// Bounds the transfers that a peer can make this end keep.
  static constexpr std::size_t most = std::size_t{1} << 16;

  explicit Queue(std::uint64_t first) : next_(first), unused_(first) {}

  /// Sender: adds a transfer behind all others and returns the number of its first chunk. Fails after close().
  Result<std::uint64_t> append(DrivenPtr driven);
  /// Receiver: adds the transfer whose first chunk has the number `first`. ProtocolError if one of its numbers is used
  /// already, or if too many transfers wait. Fails after close().
  Status insert(std::uint64_t first, DrivenPtr driven);

  /// Returns the number of the next chunk.
  [[nodiscard]] std::uint64_t next() const { return next_; }
  /// Returns the transfer of the next chunk; null if it is not known yet.
  [[nodiscard]] Driven* due() const;
  /// Begins the next chunk. Call only if due() is not null.
  struct Chunk {
    std::uint64_t number;
    DrivenPtr driven;
    std::byte* data;  // the chunk's place in the transfer's memory; null: the bytes are dropped
    std::size_t bytes;
    Status status;  // the status of the transfer so far
  };
  Chunk begin();

  [[nodiscard]] bool empty() const { return waiting_.empty(); }
  /// Returns how many transfers have chunks that have not begun.
  [[nodiscard]] std::size_t size() const { return waiting_.size(); }
  /// Fails all transfers with `status` and returns those that are over, for the caller to finish. A transfer with
  /// chunks in flight is over when these have ended. Later calls do nothing.
  std::vector<DrivenPtr> close(const Status& status);
  [[nodiscard]] bool closed() const { return !closed_.ok(); }

 private:
  Status closed_;
  std::uint64_t next_;
  std::uint64_t unused_;
  std::map<std::uint64_t, DrivenPtr> waiting_;  // by the number of the first chunk that has not begun
};

}  // namespace tensorferry::cuda_basic
