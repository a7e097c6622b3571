/// One direction of a cuda_basic channel at one end, as bulk data of the link's.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "channels/cuda/pinned.h"
#include "channels/cuda_basic/transfer.h"
#include "channels/wire_use.h"

namespace tensorferry::cuda_basic {

/// As RingFlow, where no memory can be shared, or not yet: the chunks go by Wire::send_bulk and receive_bulk, their
/// numbers are its sequences. A GPU's are copied by way of a few page-locked slots, which are made in the background
/// when the first is to be carried. Thread-safe; runs completions with no lock held.
class BulkFlow final : public std::enable_shared_from_this<BulkFlow> {
 public:
  /// `broken`: see RingFlow.
  BulkFlow(Direction direction, std::shared_ptr<WireUse> wire, Device device, Completion broken = {})
      : direction_(direction), wire_(std::move(wire)), device_(device), broken_(std::move(broken)) {}
  ~BulkFlow();
  BulkFlow(const BulkFlow&) = delete;
  BulkFlow& operator=(const BulkFlow&) = delete;

  std::uint64_t send(Transfer transfer);
  /// `landed` runs when the last chunk is in the memory.
  void receive(std::uint64_t first, Transfer transfer);
  void close(const Status& status);

 private:
  static constexpr std::size_t slots = 4;
  static constexpr std::size_t most_in_flight = 2 * slots;  // chunks, whatever a peer says of its buffers' sizes

  [[nodiscard]] bool on_gpu() const { return device_.type == DeviceType::cuda; }
  void start(const DrivenPtr& driven, const Status& taken, std::unique_lock<std::mutex> lock);
  void make_slots();
  void pump();
  /// What the next chunk goes through: nullopt: not yet; null: nothing.
  std::optional<std::byte*> slot_for(Driven& due);
  void send_chunk(Queue::Chunk chunk, std::byte* slot);
  void receive_chunk(Queue::Chunk chunk, std::byte* slot);
  void copy_on_stream(std::byte* to, const std::byte* from, std::size_t bytes, Completion then);
  void stop(const Status& status);
  void end_chunk(const DrivenPtr& driven, std::byte* slot, const Status& status);

  const Direction direction_;
  const std::shared_ptr<WireUse> wire_;
  const Device device_;

  std::mutex mutex_;  // guards what follows
  Completion broken_;
  Queue queue_{1};
  std::size_t in_flight_ = 0;  // chunks
  CUstream stream_ = nullptr;  // GPU: made at first use
  cuda::Pinned memory_;
  std::vector<std::byte*> free_;
  bool making_slots_ = false;
  Status no_slots_;  // why there will never be any
};

}  // namespace tensorferry::cuda_basic
