#include "channels/cuda_basic/bulk_flow.h"

#include <utility>

#include "channels/completion.h"
#include "channels/cuda/event_poller.h"
#include "channels/cuda_basic/slots.h"

namespace tensorferry::cuda_basic {

using cuda::api;
using cuda::DeviceGuard;

namespace {

Status link_gone() { return {Code::connection_lost, "the link has ended"}; }

Buffer piece(std::byte* data, std::size_t bytes) {
  Buffer buffer;
  buffer.data = data;
  buffer.bytes = bytes;
  return buffer;
}

}  // namespace

std::optional<std::byte*> BulkFlow::slot_for(Driven& due) {
  if (!on_gpu() || !due.copies() || due.diverted) return nullptr;
  const DeviceGuard here(device_.index);
  due.fail(here.status());
  if (due.begun == 0 && due.copies()) due.fail(prepare(due));
  if (!due.copies() || due.diverted) return nullptr;
  const bool awaits_peer = direction_ == Direction::in && due.transfer.carried && !carried_->is_offered(queue_.next());
  if (waits_for_slot_ || awaits_peer) return std::nullopt;
  const auto slot = Slots::of_this_process(direction_).lend(device_.index, [self = shared_from_this()] {
    {
      const std::lock_guard lock(self->mutex_);
      self->waits_for_slot_ = false;
    }
    self->pump();
  });
  due.fail(slot.status());
  if (!slot.ok()) return nullptr;
  waits_for_slot_ = *slot == nullptr;
  return waits_for_slot_ ? std::nullopt : std::optional(*slot);
}

/// Begins chunks while there are slots for them and fewer than `most_in_flight` are in flight.
void BulkFlow::pump() {
  while (true) {
    std::unique_lock lock(mutex_);
    auto* const due = queue_.due();
    if (due == nullptr || in_flight_ == most_in_flight) return;
    const auto slot = slot_for(*due);
    if (!slot) return;
    auto chunk = queue_.begin();
    ++in_flight_;
    lock.unlock();
    if (direction_ == Direction::out)
      send_chunk(std::move(chunk), *slot);
    else
      receive_chunk(std::move(chunk), *slot);
  }
}

void BulkFlow::send_chunk(Queue::Chunk chunk, std::byte* slot) {
  const auto end = [self = shared_from_this(), driven = chunk.driven, slot](const Status& status) {
    if (!status.ok()) self->stop(status);
    self->end_chunk(driven, slot, status);
  };
  if (chunk.data == nullptr) return end(chunk.status);
  const auto bytes = chunk.bytes;
  const auto* const data = chunk.data;
  auto give = [self = shared_from_this(), chunk = std::move(chunk), slot, end](const Status& copied) {
    if (!copied.ok()) return end(copied);
    const auto source = piece(slot != nullptr ? slot : chunk.data, chunk.bytes);
    if (chunk.driven->transfer.carried) return self->carried_->send(chunk.number, source, end);
    if (!self->wire_->with([&](Wire& wire) { wire.send_bulk(chunk.number, source, end); })) end(link_gone());
  };
  if (slot == nullptr) return give({});
  copy_on_stream(slot, data, bytes, std::move(give));
}

void BulkFlow::receive_chunk(Queue::Chunk chunk, std::byte* slot) {
  const auto destination = piece(slot != nullptr ? slot : chunk.data, chunk.bytes);
  const auto number = chunk.number;
  const bool carried = chunk.driven->transfer.carried;
  auto received = [self = shared_from_this(), chunk = std::move(chunk), slot](const Status& status) {
    const auto end = [self, driven = chunk.driven, slot](const Status& copied) {
      self->end_chunk(driven, slot, copied);
    };
    if (!status.ok()) self->stop(status);
    if (slot == nullptr || !status.ok()) return end(status);
    self->copy_on_stream(chunk.data, slot, chunk.bytes, end);
  };
  if (carried) return carried_->receive(number, destination, received);
  if (!wire_->with([&](Wire& wire) { wire.receive_bulk(number, destination, received); })) received(link_gone());
}

void BulkFlow::copy_on_stream(std::byte* to, const std::byte* from, std::size_t bytes, Completion then) {
  const DeviceGuard here(device_.index);
  const auto result = here.status().ok()
                          ? api()->memcpy_async(cuda::address_of(to), cuda::address_of(from), bytes, stream_)
                          : CUDA_ERROR_INVALID_CONTEXT;
  if (result != CUDA_SUCCESS) return complete(std::move(then), cuda::status_of(result, "cuda_basic's copy"));
  cuda::EventPoller::of_this_process().when_done(cuda::Watch::closely, device_.index, stream_, std::move(then));
}

void BulkFlow::end_chunk(const DrivenPtr& driven, std::byte* slot, const Status& status) {
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    --in_flight_;
    driven->fail(status);
    --driven->pending;
    over = driven->over();
  }
  if (slot != nullptr) Slots::of_this_process(direction_).give_back(slot);
  if (over) driven->finish();
  pump();
}

/// Fails all transfers of this direction, and runs `broken_` once.
void BulkFlow::stop(const Status& status) {
  Completion broken;
  {
    const std::lock_guard lock(mutex_);
    broken = std::move(broken_);
  }
  close(status);
  complete(std::move(broken), status);
}

}  // namespace tensorferry::cuda_basic
