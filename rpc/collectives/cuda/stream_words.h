/// The words by which the streams of a group's ranks wait for one another. They lie in a page of the group's board,
/// which each rank page-locks.
#pragma once

#include <cstdint>
#include <memory>

#include "channels/cuda/pinned.h"

namespace tensorferry::collectives::cuda {

using tensorferry::cuda::Word;

/// A page of host memory that is locked for the devices of this process. Ranks of one process that share the page share
/// this object. When the last owner drops it, the background thread unlocks the page.
class LockedPage;

/// The words of one group, at one rank. Each rank has a word for each other rank that waits for it, so that a rank can
/// release its own streams without releasing those of another. A word counts the meetings of the ranks, which all
/// number alike, and its comparison is cyclic (cuda::Word). One more word a rank counts the operations that its stream
/// has ended.
///
/// Other processes write the words. Thread-safe.
class StreamWords final {
 public:
  /// `page` is memory of Board::words_bytes that all ranks map. ResourceExhausted, or ChannelUnavailable.
  static Result<std::shared_ptr<StreamWords>> lock(Buffer page, std::size_t rank, std::size_t ranks, int device);

  /// Enqueues on `stream`: tells each other rank that this one has come to `meeting`, then waits until each has.
  [[nodiscard]] CUresult meet(CUstream stream, std::uint32_t meeting) const;
  /// Enqueues the first part of meet() alone, or makes the stream wait for `rank` alone.
  [[nodiscard]] CUresult come(CUstream stream, std::uint32_t meeting) const;
  [[nodiscard]] CUresult await(CUstream stream, std::uint32_t meeting, std::size_t rank) const {
    return to(rank_, rank).wait_on(stream, meeting);
  }
  /// Enqueues on `stream`: this rank has ended `operation`.
  [[nodiscard]] CUresult end(CUstream stream, std::uint32_t operation) const;
  /// Returns the word to which a kernel may write the number of the operation instead.
  [[nodiscard]] CUdeviceptr ended_word() const { return ended_by(rank_).device; }
  /// Makes `stream` wait until this rank has ended `operation`.
  [[nodiscard]] CUresult await_end(CUstream stream, std::uint32_t operation) const {
    return ended_by(rank_).wait_on(stream, operation);
  }

  /// Enqueues on `stream`: tells all ranks, itself too, that this one has come to `meeting`, then waits until this
  /// rank's host says that it has done its part (does_its_part()).
  [[nodiscard]] CUresult meet_by_host(CUstream stream, std::uint32_t meeting) const;
  /// Returns whether the streams of all ranks, this one too, have come to `meeting` by meet_by_host().
  [[nodiscard]] bool all_have_come(std::uint32_t meeting) const;
  /// Releases this rank's stream from meet_by_host().
  void does_its_part(std::uint32_t meeting) const;
  /// Returns a slot of a rank, of Board::gpu_slot_bytes: 0 and 1 for what it gives, 2 for its result. The devices have
  /// it at the same address of theirs.
  [[nodiscard]] std::byte* slot(std::size_t rank, std::size_t which) const;
  [[nodiscard]] CUdeviceptr slot_on_device(std::size_t rank, std::size_t which) const;

  /// Returns whether the stream of `rank` has come to `meeting`, as far as this rank can tell.
  [[nodiscard]] bool has_come(std::size_t rank, std::uint32_t meeting) const {
    return to(rank_, rank).reached(meeting);
  }
  /// Returns by how many meetings the stream of `rank`, which may be this one, is behind `meeting`; 0 or less: it has
  /// come. Not to be asked once a stream has been released.
  [[nodiscard]] std::int32_t behind(std::size_t rank, std::uint32_t meeting) const {
    const auto reader = rank == rank_ ? (rank_ + 1) % ranks_ : rank_;
    return static_cast<std::int32_t>(meeting - to(reader, rank).host->load(std::memory_order_acquire));
  }
  [[nodiscard]] bool has_ended(std::size_t rank, std::uint32_t operation) const {
    return ended_by(rank).reached(operation);
  }
  /// Releases the streams of this rank that wait for `rank` in `meeting` or before it. A live rank may still write
  /// earlier values over the word, so the caller repeats this until the streams have passed.
  void release(std::size_t rank, std::uint32_t meeting) const {
    to(rank_, rank).raise_past(meeting);
    parts_done().raise_past(meeting);
  }

  // For kernels that meet by flags: words that they read and write, at this rank.
  [[nodiscard]] CUdeviceptr abort_word() const { return abort().device; }
  [[nodiscard]] CUdeviceptr wait_words() const { return waits(0).device; }
  /// Ends all kernels of this rank that wait, also later ones.
  void end_kernels() const { abort().set(1); }
  /// Returns the meeting in which a kernel of this rank has waited for `rank` for some milliseconds, and still does; 0:
  /// it does not. Two meetings in a row never have the same number.
  [[nodiscard]] std::uint32_t kernel_waits_for(std::size_t rank) const {
    return waits(rank).host->load(std::memory_order_acquire);
  }

 private:
  StreamWords(std::shared_ptr<LockedPage> page, std::size_t rank, std::size_t ranks)
      : page_(std::move(page)), rank_(rank), ranks_(ranks) {}
  /// Returns the word that `from` writes and `reader` waits for.
  [[nodiscard]] Word to(std::size_t reader, std::size_t from) const { return word(reader * ranks_ + from); }
  [[nodiscard]] Word ended_by(std::size_t rank) const { return word(ranks_ * ranks_ + rank); }
  [[nodiscard]] Word parts_done() const { return word(ranks_ * ranks_ + ranks_ + rank_); }
  [[nodiscard]] Word abort() const { return word(ranks_ * ranks_ + 2 * ranks_ + rank_); }
  [[nodiscard]] Word waits(std::size_t rank) const { return word(ranks_ * ranks_ + (3 + rank_) * ranks_ + rank); }
  [[nodiscard]] Word word(std::size_t index) const;
  void append_coming(std::uint32_t meeting, std::vector<CUstreamBatchMemOpParams>& batch) const;

  const std::shared_ptr<LockedPage> page_;
  const std::size_t rank_, ranks_;
};

}  // namespace tensorferry::collectives::cuda
