/// The board of a group whose ranks share one host: flags and slots in memory that all of them map. Ranks announce the
/// steps of an operation there, and small data lies in the slots.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <tuple>

#include "base/clock.h"
#include "base/futex.h"
#include "base/spin.h"
#include "base/status.h"
#include "channels/buffer.h"

namespace tensorferry::collectives {

/// What bounds a wait. `failed` returns the error that ended the group, or Ok. `interrupted` returns true if a signal
/// shall end the wait; it may be empty.
struct WaitLimits {
  Clock::time_point until;
  std::function<Status()> failed;
  std::function<bool()> interrupted;
  Clock clock{};
};
/// Returns the error that ends a wait now: the group's, Cancelled after an interruption, DeadlineExceeded (without a
/// text of its own) after `until`; else Ok.
Status why_ended(const WaitLimits& limits);
/// Returns whether `status` is why_ended()'s of a wait whose time is over, which the caller gives a text.
inline bool time_is_over(const Status& status) {
  return status.code() == Code::deadline_exceeded && status.what().empty();
}
/// The error of a wait that a signal has ended.
inline Status interruption() { return {Code::cancelled, "a signal ended the wait"}; }
/// How long a wait sleeps at most before it asks why_ended() again.
inline constexpr std::chrono::milliseconds longest_sleep{100};

/// Where the bytes of one rank's step lie.
enum class Place : std::uint32_t {
  none = 0,    // it gives no bytes
  slot = 1,    // behind the announcement
  memory = 2,  // in its process
  region = 3,  // in its region `region` (channels/region.h)
  mail = 4,    // they come as messages
};

/// One operation as each rank sees it. All ranks must call with the same.
struct Fingerprint {
  std::uint8_t operation = 0;
  std::uint8_t dtype = 0;
  /// The low four bits: the Reduction. The high four: 0, or 1 more than the Algorithm that the call asks for.
  std::uint8_t reduction = 0;
  /// 0: memory of the host. Else the rank's number for a GPU whose memory the ranks reach directly (DeviceOperations).
  /// Such calls are on a board, so the number never travels in a message.
  std::uint8_t device = 0;
  static constexpr std::uint8_t captured = 0x80;  // added to `device`: the call is captured into a CUDA graph
  /// `operation` of the step in which the ranks find out how they reach one another's devices.
  static constexpr std::uint8_t first_on_device = 255;
  std::int32_t root = -1;
  std::uint64_t elements = 0;
  double factor = 1;
  static constexpr std::uint8_t algorithm_shift = 4;
  [[nodiscard]] std::uint8_t reduction_kind() const noexcept { return reduction & ((1U << algorithm_shift) - 1); }
  /// Returns the algorithm that the call asks for, which another rank may have made up.
  [[nodiscard]] std::optional<std::uint8_t> algorithm() const noexcept {
    const auto told = static_cast<std::uint8_t>(reduction >> algorithm_shift);
    return told == 0 ? std::nullopt : std::optional<std::uint8_t>(told - 1);
  }
  static constexpr std::tuple fields{&Fingerprint::operation, &Fingerprint::dtype,    &Fingerprint::reduction,
                                     &Fingerprint::root,      &Fingerprint::elements, &Fingerprint::factor};
  bool operator==(const Fingerprint&) const = default;
};

/// The bytes of a rank that another rank takes.
struct Part {
  std::uint64_t offset = 0;  // in the slot or the region; in memory, the address
  std::uint64_t bytes = 0;
};

/// What a rank announces for one step. The parts that each rank takes follow it on the board.
struct Announcement {
  Fingerprint fingerprint;
  Place place = Place::none;
  std::uint32_t unused = 0;
  std::uint64_t region = 0;
};

/// A view of the board's memory. Other processes write it at any time, so each value is taken out once and then
/// checked.
///
/// Steps are numbered from 1, the same at all ranks. A rank announces a step, waits for the announcements of the
/// others, takes its parts, and says that it is done. A step's slot is used again two steps later; slot() therefore
/// waits until all ranks are done with the step that used it before.
///
/// Threads: one thread at a time uses a board; any thread may call wake(), announced() and announcement().
class Board final {
 public:
  static constexpr std::size_t slot_bytes = std::size_t{64} << 10;
  /// About how long it takes to sleep and to be woken on an idle CPU. A rank that was woken is late by as much, so the
  /// others spin at least as long, unless the host has fewer CPUs than ranks: else each would make the next one sleep.
  static constexpr std::chrono::microseconds woken_after{100};

  /// The most ranks for which a board has stream words.
  static constexpr std::size_t most_ranks_with_words = 16;
  static constexpr std::size_t words_bytes = 4096;  // a page, because GPUs map it
  /// Behind the words each rank has three slots of this size, which GPUs read and write (cuda/stream_words.h).
  static constexpr std::size_t gpu_slot_bytes = std::size_t{256} << 10;
  static constexpr std::size_t gpu_slots = 3;

  /// Returns the size of the memory for `ranks` ranks.
  static std::size_t bytes_for(std::size_t ranks) noexcept;
  /// `memory` is zeroed memory of bytes_for(ranks) bytes that all ranks map. This one is `rank`.
  Board(Buffer memory, std::size_t rank, std::size_t ranks);

  /// Returns this rank's slot for `step`, of slot_bytes, once no rank reads it any more.
  Result<std::byte*> slot(std::uint64_t step, const WaitLimits& limits);
  /// Publishes this rank's announcement for `step`, after its slot has been filled, and wakes the ranks that sleep.
  /// `parts` may be empty in a step whose parts no rank asks for.
  void announce(std::uint64_t step, const Announcement& announcement, std::span<const Part> parts);
  /// Waits until `rank` has announced `step`. DeadlineExceeded has no text.
  Status await(std::size_t rank, std::uint64_t step, const WaitLimits& limits);
  /// Returns whether `rank` has announced `step`.
  [[nodiscard]] bool announced(std::size_t rank, std::uint64_t step) const;
  /// Returns what `rank` has announced for `step`.
  [[nodiscard]] Announcement announcement(std::size_t rank, std::uint64_t step) const;
  /// Returns the part of the source of `rank` that `to` takes.
  [[nodiscard]] Part part(std::size_t rank, std::uint64_t step, std::size_t to) const;
  /// Returns the bytes in the slot of `rank`: slot_bytes.
  [[nodiscard]] const std::byte* slot_of(std::size_t rank, std::uint64_t step) const;
  /// Says that this rank reads nothing of `step` any more.
  void done(std::uint64_t step);
  /// Says that this rank's bytes of `step` may change from now on, although ranks may still read them.
  void withdraw(std::uint64_t step);
  /// Returns whether `rank` has withdrawn its bytes of `step`. A rank that has read them asks afterwards: they may have
  /// changed meanwhile.
  [[nodiscard]] bool withdrawn(std::size_t rank, std::uint64_t step) const;
  /// Waits until `rank` is done with `step`.
  Status await_done(std::size_t rank, std::uint64_t step, const WaitLimits& limits);

  /// Returns the words and slots for streams, whole pages, and their owner. Empty if there are too many ranks.
  [[nodiscard]] Buffer stream_words() const;

  /// Ends a sleep of this rank's thread, so that it asks WaitLimits::failed.
  void wake();

 private:
  struct alignas(64) Flags {
    std::atomic<std::uint64_t> announced;
    std::atomic<std::uint64_t> done;
    std::atomic<std::uint32_t> sleeping;  // 1: the rank sleeps, or is about to, and wants its bell rung
    std::atomic<std::uint32_t> bell;
    std::atomic<std::uint64_t> withdrawn;  // the last step whose bytes the rank has withdrawn
  };
  [[nodiscard]] Flags& flags(std::size_t rank) const;
  [[nodiscard]] std::byte* entry(std::size_t rank, std::uint64_t step) const;
  void ring_sleepers();
  Status wait_for(const std::atomic<std::uint64_t>& flag, std::uint64_t step, const WaitLimits& limits);

  const Buffer memory_;
  const std::size_t rank_;
  const std::size_t ranks_;
  const std::chrono::nanoseconds spins_for_;  // at least
  Spin spin_;
};

}  // namespace tensorferry::collectives
