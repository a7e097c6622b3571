/// One direction of a cuda_basic channel at one end: the bytes between this end's memory and the ring, or the link.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "channels/buffer.h"
#include "channels/cuda/watcher.h"
#include "channels/cuda_basic/ring.h"
#include "channels/wire_use.h"

namespace tensorferry::cuda_basic {

enum class Direction : std::uint8_t { out, in };

/// Transfers are carried one after another, in the order in which the receiver asked for them: both ends number their
/// chunks by it, those by ring and those by bulk data each for themselves. The watcher's thread sees which chunks are
/// due; where this end's memory is a GPU's it puts them on a stream of the flow's own, else it copies them.
///
/// No stream ever waits for what a peer's host has yet to do. Such a stream makes whatever the driver synchronises with
/// it (cudaMalloc, page-locking) wait for the peer too; and where two processes wait so for each other, for ever.
///
/// Thread-safe; runs completions with no lock held.
class Flow final : public std::enable_shared_from_this<Flow> {
 public:
  Flow(Direction direction, std::shared_ptr<WireUse> wire, Device device)
      : direction_(direction), wire_(std::move(wire)), device_(device) {}
  ~Flow();

  /// Before the first transfer by ring.
  void use(std::shared_ptr<Ring> ring);

  struct Transfer {
    Buffer memory;
    cuda::Event ready;           // out: from when on the memory holds the bytes; none: it does
    bool ring = false;           // else bulk data
    UniqueFunction<void()> ask;  // in: tells the sender; runs under the flow's lock, in the order of the transfers
    Completion landed;           // in: the bytes are usable in the order of the memory's stream
    Completion done;             // the memory is read or written no more
  };
  void carry(Transfer transfer);

  /// Ends the transfers that have not, with `status`.
  void close(Status status);

 private:
  /// A transfer under way.
  struct Driven {
    Transfer transfer;
    std::size_t begun = 0;     // bytes
    std::size_t finished = 0;  // of those
    std::size_t pending = 0;   // chunks
    Status status;
  };
  using DrivenPtr = std::shared_ptr<Driven>;

  [[nodiscard]] bool on_gpu() const { return device_.type == DeviceType::cuda; }
  [[nodiscard]] cuda::Word before(std::size_t slot) const {
    return direction_ == Direction::out ? ring_->free(slot) : ring_->ready(slot);
  }
  [[nodiscard]] cuda::Word after(std::size_t slot) const {
    return direction_ == Direction::out ? ring_->ready(slot) : ring_->free(slot);
  }
  /// Of `before`, for a chunk to be copied.
  [[nodiscard]] std::uint32_t awaited(std::uint32_t value) const {
    return direction_ == Direction::out ? value - 1 : value;
  }

  Status begin_on_streams(const Transfer& transfer);
  CUresult copy_on_stream(std::byte* memory, std::size_t slot, std::uint32_t value, std::size_t bytes);
  [[nodiscard]] Status end_on_streams(const Transfer& transfer);

  void by_ring(Transfer transfer);
  cuda::Watcher::Progress turn();
  Status copy_due(Driven& driven);
  Status copy_chunk(std::byte* memory, std::size_t slot, std::uint32_t value, std::size_t bytes);

  void bulk(Transfer transfer);
  void pump();
  void begin_chunk(const DrivenPtr& driven, std::size_t at, std::byte* slot, std::uint64_t sequence);
  void send_chunk(const DrivenPtr& driven, Buffer chunk, std::byte* slot, std::uint64_t sequence);
  void chunk_received(const DrivenPtr& driven, std::size_t at, std::byte* slot, Status status);
  void chunk_done(const DrivenPtr& driven, std::size_t bytes, std::byte* slot, const Status& status);
  void finish(Driven& driven, Status status);
  Status prepare_slots();

  static constexpr std::size_t bulk_slots = 4;

  const Direction direction_;
  const std::shared_ptr<WireUse> wire_;
  const Device device_;

  std::mutex mutex_;
  Status closed_;
  // GPU: made at first use. Chunks by ring use them in turn, so that the GPU sets the word behind one chunk while it
  // copies the next (by one stream, each chunk took 7 us longer on an H200); the rest uses the first.
  std::array<CUstream, 2> streams_{};
  std::shared_ptr<Ring> ring_;
  std::uint64_t next_chunk_ = 0;  // by ring
  std::deque<DrivenPtr> ring_transfers_;
  bool taking_turns_ = false;

  std::uint64_t next_bulk_ = 1;
  std::deque<DrivenPtr> bulk_;  // of which chunks have not begun
  cuda::Pinned slots_;
  std::vector<std::byte*> free_slots_;
};

}  // namespace tensorferry::cuda_basic
