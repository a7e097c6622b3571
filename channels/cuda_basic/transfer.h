/// What a cuda_basic channel carries: buffers, in chunks, one after another.
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

/// Of each chunk of a buffer but the last. A chunk's end costs the copy engines some 3 us (on an H200), while the one
/// that is under way is what the receiver's GPU is behind the sender's; the best is about the root of the product.
constexpr std::size_t chunk_bytes(std::size_t buffer) {
  constexpr std::size_t page = 4096, least = std::size_t{1} << 20;
  return std::clamp(buffer / 16 / page * page, least, most_chunk_bytes);
}
constexpr std::uint64_t chunks_of(std::size_t buffer, std::size_t begun = 0) {
  const auto left = buffer - begun, each = chunk_bytes(buffer);
  return left / each + (left % each != 0 ? 1 : 0);
}

/// A buffer to be sent or received; never an empty one.
struct Transfer {
  Buffer memory;      // in: no data: what comes is dropped
  cuda::Event ready;  // from when on the memory may be read, or written; none: now
  Completion landed;  // in: the bytes are usable in the order of the memory's stream
  Completion done;    // the memory is read or written no more
};

/// One under way. `finish` it once it is over.
struct Driven {
  explicit Driven(Transfer t) : transfer(std::move(t)) {}

  Transfer transfer;
  std::size_t begun = 0;    // bytes
  std::size_t pending = 0;  // chunks that have begun and not ended
  Status status;
  std::optional<std::chrono::steady_clock::time_point> first_ended;  // its first chunk; where it is timed

  [[nodiscard]] std::size_t bytes() const { return transfer.memory.bytes; }
  /// Chunks that have not begun.
  [[nodiscard]] std::uint64_t chunks_left() const { return chunks_of(bytes(), begun); }
  /// Whether chunks are copied, or let pass.
  [[nodiscard]] bool copies() const { return transfer.memory.data != nullptr && status.ok(); }
  [[nodiscard]] bool over() const { return pending == 0 && begun == bytes(); }
  void fail(const Status& error) {
    if (status.ok()) status = error;
  }
  /// With no lock held.
  void finish();
};
using DrivenPtr = std::shared_ptr<Driven>;
/// With no lock held.
void finish(const std::vector<DrivenPtr>& over);

/// Transfers of one direction that have not begun all their chunks, by the numbers of those. The sender gives each the
/// numbers behind the last one's. The receiver hears of them in any order, and begins none before those in front of it.
class Queue {
 public:
  /// No peer makes this end keep more.
  static constexpr std::size_t most = std::size_t{1} << 16;

  explicit Queue(std::uint64_t first) : next_(first), unused_(first) {}

  /// The number of its first chunk. Fails after close().
  Result<std::uint64_t> append(DrivenPtr driven);
  /// ProtocolError where other chunks have one of those numbers, or too many wait. Fails after close().
  Status insert(std::uint64_t first, DrivenPtr driven);

  /// The number of the next chunk.
  [[nodiscard]] std::uint64_t next() const { return next_; }
  /// Whose it is; null: there is none, or none yet.
  [[nodiscard]] Driven* due() const;
  /// Begins that chunk.
  struct Chunk {
    std::uint64_t number;
    DrivenPtr driven;
    std::byte* data;  // in its memory; null: it is let pass
    std::size_t bytes;
    Status status;  // of the transfer, so far
  };
  Chunk begin();

  [[nodiscard]] bool empty() const { return waiting_.empty(); }
  /// Ends all with `status`: what remains to be done is to finish those that are over, which are returned. Once; later
  /// calls do nothing.
  std::vector<DrivenPtr> close(const Status& status);
  [[nodiscard]] bool closed() const { return !closed_.ok(); }

 private:
  Status closed_;
  std::uint64_t next_;
  std::uint64_t unused_;
  std::map<std::uint64_t, DrivenPtr> waiting_;  // by the first chunk that has not begun
};

}  // namespace tensorferry::cuda_basic
