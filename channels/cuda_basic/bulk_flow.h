/// One direction of a cuda_basic channel at one end, as bulk data of the link's.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "channels/cuda/pinned.h"
#include "channels/cuda_basic/flow.h"
#include "channels/wire_use.h"

namespace tensorferry::cuda_basic {

/// As RingFlow, where no memory can be shared, or not yet: the chunks go by Wire::send_bulk and receive_bulk, their
/// numbers are its sequences. A GPU's are copied by way of a few page-locked slots, which are made in the background
/// when the first is to be carried. `landed` runs when the last chunk is in the memory.
class BulkFlow final : public Flow, public std::enable_shared_from_this<BulkFlow> {
 public:
  BulkFlow(Direction direction, std::shared_ptr<WireUse> wire, Device device, Completion broken = {})
      : Flow(direction, device, std::move(broken), 1), wire_(std::move(wire)) {}

 private:
  static constexpr std::size_t slots = 4;
  static constexpr std::size_t most_in_flight = 2 * slots;  // chunks, whatever a peer says of its buffers' sizes

  void go_on() override { pump(); }
  void make_slots();
  void pump();
  /// What the next chunk goes through: nullopt: not yet; null: nothing.
  std::optional<std::byte*> slot_for(Driven& due);
  void send_chunk(Queue::Chunk chunk, std::byte* slot);
  void receive_chunk(Queue::Chunk chunk, std::byte* slot);
  void copy_on_stream(std::byte* to, const std::byte* from, std::size_t bytes, Completion then);
  void stop(const Status& status);
  void end_chunk(const DrivenPtr& driven, std::byte* slot, const Status& status);

  const std::shared_ptr<WireUse> wire_;
  std::size_t in_flight_ = 0;  // chunks; this and the rest: guarded by mutex_
  cuda::Pinned memory_;
  std::vector<std::byte*> free_;
  bool making_slots_ = false;
  Status no_slots_;  // why there will never be any
};

}  // namespace tensorferry::cuda_basic
