/// Shared memory that GPUs write and read as well as processes.
#pragma once

#include <atomic>
#include <cstdint>

#include "channels/cuda/device.h"
#include "channels/shared_memory.h"

namespace tensorferry::cuda {

/// Page-locks a mapping for the devices of this process. Movable, one owner. What was put on streams must be done when
/// it is destroyed. To unlock pages the driver waits until the GPU has nothing left to do, with a lock held without
/// which no thread can put anything on a stream; so the pages of past owners are kept, up to `most_kept` bytes, and
/// then unlocked all at once, in the background.
class Pinned final {
 public:
  static constexpr std::size_t most_kept = std::size_t{256} << 20;

  Pinned() noexcept = default;
  /// Takes the pages, and some milliseconds for some megabytes: not for a call's path. `device` is any that will use
  /// it.
  static Result<Pinned> lock(SharedMemory memory, int device);
  /// For a process that leaves such memory to its host: nothing is locked, and on_device() means nothing.
  static Pinned unlocked(SharedMemory memory);
  Pinned(Pinned&& other) noexcept { *this = std::move(other); }
  Pinned& operator=(Pinned&& other) noexcept;
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned();

  explicit operator bool() const noexcept { return static_cast<bool>(memory_); }
  [[nodiscard]] SharedMemory& memory() noexcept { return memory_; }
  [[nodiscard]] std::byte* data() const noexcept { return memory_.data(); }
  /// Where devices find the byte at `offset`.
  [[nodiscard]] CUdeviceptr on_device(std::size_t offset) const noexcept { return address_ + offset; }

 private:
  SharedMemory memory_;
  CUdeviceptr address_ = 0;
  int device_ = 0;
};

/// A 32-bit word in such memory by which streams, and processes, wait for one another: it counts up, and who waits for
/// a value goes on at any later one (CU_STREAM_WAIT_VALUE_GEQ, which compares cyclically). Idea and figures: stream
/// words order streams of two processes as IPC events do, but a process whose peer has died frees its own streams by
/// writing the word itself.
struct Word {
  std::atomic<std::uint32_t>* host = nullptr;
  CUdeviceptr device = 0;

  [[nodiscard]] bool reached(std::uint32_t value) const noexcept {
    return is_past(host->load(std::memory_order_acquire), value);
  }
  void set(std::uint32_t value) const noexcept { host->store(value, std::memory_order_release); }
  /// Has streams that wait for `value` go on although it has not been written; unwritten() still tells.
  void raise_past(std::uint32_t value) const noexcept {
    auto now = host->load(std::memory_order_acquire);
    while (!is_past(now, value) && !host->compare_exchange_weak(now, value + (1U << 30))) {
    }
  }
  /// Whether `value`, the last that a stream was given to write, is yet to be written.
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
Word word_at(const Pinned& memory, std::size_t offset);

}  // namespace tensorferry::cuda
