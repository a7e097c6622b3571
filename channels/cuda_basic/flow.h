/// The base of the two flows of a cuda_basic channel, by ring and as bulk data: one direction at one end.
#pragma once

#include <cstdint>
#include <mutex>

#include "base/mutex.h"
#include "channels/cuda_basic/detour.h"
#include "channels/cuda_basic/transfer.h"

namespace tensorferry::cuda_basic {

/// Queues the transfers of a direction and starts them in order. Thread-safe; runs completions with no lock held.
class Flow {
 public:
  virtual ~Flow();
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;

  /// The number of the first chunk of a direction.
  static constexpr std::uint64_t first_chunk = 1;

  /// Sends a buffer, whose memory is not busy; its first chunks start at once if there is room. Returns the number of
  /// its first chunk, which the other end passes to receive(). 0: the flow is closed, and the transfer has failed.
  std::uint64_t send(Transfer transfer);
  /// Receives the buffer whose first chunk has the number `first`.
  void receive(std::uint64_t first, Transfer transfer);
  /// Fails all unfinished transfers with `status`: at once, or when the copies in flight of a transfer are done.
  void close(const Status& status);

 protected:
  /// `broken` (senders only): runs with the error when the sender can send no more, for example because its GPU fails.
  /// The lost chunks keep their numbers, so the receiver can take nothing behind them: all transfers fail, and `broken`
  /// must tell the other end. `detour` (receivers on a GPU only): takes the bytes for memory that is busy.
  Flow(Direction direction, Device device, Completion broken, std::shared_ptr<Detour> detour)
      : direction_(direction), device_(device), detour_(std::move(detour)), broken_(std::move(broken)) {}

  /// Makes progress after a transfer was added to the queue. Runs with no lock held.
  virtual void advance() = 0;

  /// Does what send() does, under a lock of mutex_ that the caller has taken; unlocks it.
  std::uint64_t send(Transfer transfer, std::unique_lock<Mutex>& lock);

  [[nodiscard]] bool on_gpu() const { return device_.type == DeviceType::cuda; }
  /// Returns whether the GPU still uses the transfer's memory.
  static bool busy(Driven& driven);
  /// Makes a transfer ready for the copy of its first chunk: creates the flow's stream at first use, and diverts the
  /// transfer if its memory is busy. If that fails, the stream waits. Call inside DeviceGuard.
  Status prepare(Driven& driven);

  const Direction direction_;
  const Device device_;
  const std::shared_ptr<Detour> detour_;
  Mutex mutex_;  // guards the members below
  Completion broken_;
  Queue queue_{first_chunk};
  CUstream stream_ = nullptr;  // of a flow on a GPU; made at first use

 private:
  /// Makes progress, or fails `driven` if the queue did not take it.
  void start(const DrivenPtr& driven, const Status& taken);
};

}  // namespace tensorferry::cuda_basic
