/// Page-locked shared memory that GPUs and processes read and write, and the stream words in it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/shared_memory.h"
#include "channels/cuda/device.h"

namespace tensorferry::cuda {

/// A shared mapping, page-locked for the devices of this process. Movable, one owner. All stream work that uses the
/// memory must be done when the owner is destroyed.
///
/// The destructor does not unlock the pages at once. To unlock pages the driver waits until the GPU is idle, and
/// meanwhile holds a lock that every launch needs. So the process keeps the pages of past owners for `kept_for` at
/// most, and up to `most_kept` bytes, then unlocks all of them on the background thread. They are used for nothing
/// else, because a peer that has mapped them may still do so.
class Pinned final {
 public:
  static constexpr std::size_t most_kept = std::size_t{256} << 20;
  static constexpr std::chrono::seconds kept_for{10};
  /// The bound on this process's page-locked memory. Pages of words are not counted against it.
  static constexpr std::size_t most_bytes = std::size_t{1} << 30;
  static constexpr std::size_t always_allowed = std::size_t{1} << 16;

  Pinned() noexcept = default;
  /// Page-locks `memory`. `device` is any device that will use it. Allocates the pages and takes some milliseconds for
  /// a few megabytes, so it must not run on a call's path. ResourceExhausted: the process would have more than
  /// `most_bytes`, or the system has no memory left.
  /// `bounded`: false if another bound holds for this memory.
  static Result<Pinned> lock(SharedMemory memory, int device, bool bounded = true);
  /// Holds `memory` without locking it, for an end that only the CPU reads and writes. on_device() is not valid.
  static Pinned unlocked(SharedMemory memory);
  Pinned(Pinned&& other) noexcept { *this = std::move(other); }
  Pinned& operator=(Pinned&& other) noexcept;
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned();

  explicit operator bool() const noexcept { return static_cast<bool>(memory_); }
  [[nodiscard]] SharedMemory& memory() noexcept { return memory_; }
  [[nodiscard]] std::byte* data() const noexcept { return memory_.data(); }
  /// Returns the device address of the byte at `offset`.
  [[nodiscard]] CUdeviceptr on_device(std::size_t offset) const noexcept { return address_ + offset; }

 private:
  SharedMemory memory_;
  CUdeviceptr address_ = 0;
  int device_ = 0;
};

/// A 32-bit semaphore in page-locked memory, on which streams and hosts of two processes wait for each other. The word
/// counts up. A waiter for a value continues when the word has reached that value or a later one; the comparison is
/// cyclic (CU_STREAM_WAIT_VALUE_GEQ).
///
/// Words order the streams of two processes as IPC events do. Unlike with events, a host can wait for them too, and a
/// process whose peer has died can release its own streams, by writing the word itself.
struct Word {
  std::atomic<std::uint32_t>* host = nullptr;
  CUdeviceptr device = 0;

  [[nodiscard]] bool reached(std::uint32_t value) const noexcept {
    return is_past(host->load(std::memory_order_acquire), value);
  }
  void set(std::uint32_t value) const noexcept { host->store(value, std::memory_order_release); }
  /// Releases streams that wait for `value` although it has not been written. Raises the word by 2^30 beyond `value`,
  /// so that unwritten() still returns true until the value is written.
  void raise_past(std::uint32_t value) const noexcept {
    auto now = host->load(std::memory_order_acquire);
    while (!is_past(now, value) && !host->compare_exchange_weak(now, value + (1U << 30))) {
    }
  }
  /// Returns whether `value`, the last one that a stream was told to write, has not been written yet.
  [[nodiscard]] bool unwritten(std::uint32_t value) const noexcept {
    return host->load(std::memory_order_acquire) != value;
  }
  CUresult wait_on(CUstream stream, std::uint32_t value) const {
    return api()->stream_wait_value(stream, device, value, CU_STREAM_WAIT_VALUE_GEQ);
  }
  CUresult write_on(CUstream stream, std::uint32_t value) const {
    return api()->stream_write_value(stream, device, value, CU_STREAM_WRITE_VALUE_DEFAULT);
  }

 private:
  static bool is_past(std::uint32_t now, std::uint32_t value) noexcept {
    return static_cast<std::int32_t>(now - value) >= 0;
  }
};
/// Returns the word at `offset` bytes.
Word word_at(const Pinned& memory, std::size_t offset);

}  // namespace tensorferry::cuda
