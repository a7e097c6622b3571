/// Carries one direction of a cuda_basic channel as bulk data of the link, at one end.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "channels/cuda_basic/carried_chunks.h"
#include "channels/cuda_basic/flow.h"
#include "channels/wire_use.h"

namespace tensorferry::cuda_basic {

/// Replaces RingFlow if the processes cannot share memory, or have no ring yet. The chunks go by Wire::send_bulk and
/// Wire::receive_bulk; a chunk's number is its sequence there. Those of a transfer that is `carried` go by `carried`,
/// in one count with the others. A GPU's chunks are copied through page-locked slots, which all links of the process
/// share (Slots). A receiver takes the slot of a carried chunk when the chunk is offered: slots that waited for peers
/// could keep those from chunks that are there. `landed` runs when the last chunk is in the memory. If the receiver's
/// memory is busy when the first chunk is due, the transfer takes the detour, without slots.
class BulkFlow final : public Flow, public std::enable_shared_from_this<BulkFlow> {
 public:
  BulkFlow(Direction direction, std::shared_ptr<WireUse> wire, std::shared_ptr<CarriedChunks> carried, Device device,
           Completion broken = {}, std::shared_ptr<Detour> detour = {})
      : Flow(direction, device, std::move(broken), std::move(detour)),
        wire_(std::move(wire)),
        carried_(std::move(carried)) {}

  /// The peer has offered a carried chunk, which pump() may have waited for.
  void offered() { pump(); }

 private:
  static constexpr std::size_t most_in_flight = CarriedChunks::most;  // bounds what a peer's large buffers can queue

  void advance() override { pump(); }
  void pump();
  /// Takes a slot for the next chunk. Returns null if the chunk needs none, and nullopt if no slot is free yet: then
  /// pump() runs again when one is.
  std::optional<std::byte*> slot_for(Driven& due);
  void send_chunk(Queue::Chunk chunk, std::byte* slot);
  void receive_chunk(Queue::Chunk chunk, std::byte* slot);
  void copy_on_stream(std::byte* to, const std::byte* from, std::size_t bytes, Completion then);
  void stop(const Status& status);
  void end_chunk(const DrivenPtr& driven, std::byte* slot, const Status& status);

  const std::shared_ptr<WireUse> wire_;
  const std::shared_ptr<CarriedChunks> carried_;
  std::size_t in_flight_ = 0;    // chunks; mutex_ guards this and the next
  bool waits_for_slot_ = false;  // pump() will run again when a slot is free
};

}  // namespace tensorferry::cuda_basic
