#include "channels/cuda_basic/flow.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "channels/completion.h"

namespace tensorferry::cuda_basic {
namespace {

using cuda::api;
using cuda::OnDevice;
using cuda::Watch;
using cuda::Watcher;

std::size_t chunk_at(const Buffer& memory, std::size_t at) { return std::min(Ring::slot_bytes, memory.bytes - at); }

/// What has been put on `earlier` so far comes before what is put on each of `later`.
CUresult order(int device, Stream earlier, std::span<const CUstream> later) {
  const auto event = cuda::Event::record(device, earlier);
  auto result = event ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
  for (auto* const stream : later) {
    if (result == CUDA_SUCCESS) result = api()->stream_wait_event(stream, event.get(), 0);
  }
  return result;
}

}  // namespace

Flow::~Flow() {
  if (streams_[0] == nullptr) return;
  const OnDevice here(device_.index);
  if (!here.status().ok()) return;
  for (auto* const stream : streams_) {
    if (stream != nullptr) api()->stream_destroy(stream);
  }
}

void Flow::use(std::shared_ptr<Ring> ring) {
  const std::lock_guard lock(mutex_);
  if (!ring_) ring_ = std::move(ring);
}

void Flow::carry(Transfer transfer) {
  if (transfer.ring)
    by_ring(std::move(transfer));
  else
    bulk(std::move(transfer));
}

Status Flow::begin_on_streams(const Transfer& transfer) {
  auto result = CUDA_SUCCESS;
  for (auto& stream : streams_) {
    if (stream == nullptr && result == CUDA_SUCCESS) result = api()->stream_create(&stream, CU_STREAM_NON_BLOCKING);
  }
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "making a stream");
  if (direction_ == Direction::out) {
    for (auto* const stream : streams_) {
      if (transfer.ready && result == CUDA_SUCCESS) result = api()->stream_wait_event(stream, transfer.ready.get(), 0);
    }
    return cuda::status_of(result, "ordering a copy behind its source");
  }
  if (cuda::order_of(transfer.memory.stream) != cuda::Order::idle)  // what used the memory before
    result = order(device_.index, transfer.memory.stream, streams_);
  return cuda::status_of(result, "ordering a copy behind its destination");
}

/// Copies a chunk, and sets its slot's word behind it.
CUresult Flow::copy_on_stream(std::byte* memory, std::size_t slot, std::uint32_t value, std::size_t bytes) {
  auto* const stream = streams_[slot % streams_.size()];
  const auto mine = cuda::address_of(memory), there = ring_->on_device(slot);
  const bool out = direction_ == Direction::out;
  const auto result = api()->memcpy_async(out ? there : mine, out ? mine : there, bytes, stream);
  return result == CUDA_SUCCESS ? after(slot).write_on(stream, value) : result;
}

/// The first stream comes behind the second, and what follows on the memory's own stream behind both.
Status Flow::end_on_streams(const Transfer& transfer) {
  auto result = order(device_.index, streams_[1], std::span(streams_).first(1));
  if (direction_ == Direction::in && result == CUDA_SUCCESS) {
    auto* const stream = static_cast<CUstream>(transfer.memory.stream);
    result = order(device_.index, streams_[0], std::span(&stream, 1));
  }
  return cuda::status_of(result, "ordering the receiver behind a copy");
}

// By ring.

void Flow::by_ring(Transfer transfer) {
  bool begin = false;
  auto driven = std::make_shared<Driven>(Driven{std::move(transfer), 0, 0, 0, {}});
  {
    std::optional<OnDevice> here;
    if (on_gpu()) here.emplace(device_.index);
    const std::lock_guard lock(mutex_);
    // Even after an error: the peer counts its chunks.
    if (here) driven->status = here->status().ok() ? begin_on_streams(driven->transfer) : here->status();
    if (driven->transfer.ask) driven->transfer.ask();
    ring_transfers_.push_back(std::move(driven));
    begin = !std::exchange(taking_turns_, true);
  }
  if (!begin) return;
  // What a GPU can be given at once need not wait for the watcher to wake.
  if (on_gpu() && turn() == Watcher::Progress::over) return;
  Watcher::of_this_process().take_turns([self = shared_from_this()] { return self->turn(); });
}

Status Flow::copy_chunk(std::byte* memory, std::size_t slot, std::uint32_t value, std::size_t bytes) {
  if (on_gpu()) return cuda::status_of(copy_on_stream(memory, slot, value, bytes), "cuda_basic's copy");
  if (direction_ == Direction::out)
    std::memcpy(ring_->data(slot), memory, bytes);
  else
    std::memcpy(memory, ring_->data(slot), bytes);
  after(slot).set(value);
  return {};
}

/// Of the chunks whose slots are ready: a few for a GPU, one for the host, so that others have their turns.
Status Flow::copy_due(Driven& driven) {
  for (std::size_t most = on_gpu() ? Ring::slots : 1; most > 0; --most) {
    if (driven.begun == driven.transfer.memory.bytes) break;
    const auto chunk = Ring::chunk(next_chunk_);
    if (!before(chunk.slot).reached(awaited(chunk.value))) break;
    const auto bytes = chunk_at(driven.transfer.memory, driven.begun);
    auto status = copy_chunk(driven.transfer.memory.data + driven.begun, chunk.slot, chunk.value, bytes);
    if (!status.ok()) return status;
    driven.begun += bytes;
    ++next_chunk_;
  }
  return {};
}

cuda::Watcher::Progress Flow::turn() {
  using Progress = cuda::Watcher::Progress;
  DrivenPtr over;
  cuda::Event copied;
  auto progress = Progress::none;
  {
    std::optional<OnDevice> here;
    if (on_gpu()) here.emplace(device_.index);
    const std::lock_guard lock(mutex_);
    if (!ring_transfers_.empty()) {
      auto& first = *ring_transfers_.front();
      const auto begun = first.begun;
      if (first.status.ok()) first.status = closed_;
      if (first.status.ok()) first.status = copy_due(first);
      if (first.begun != begun) progress = Progress::some;
      const bool all = first.begun == first.transfer.memory.bytes;
      if (on_gpu() && here->status().ok() && streams_[1] != nullptr && (all || !first.status.ok())) {
        // Also after an error: part of it may be on the streams.
        auto ended = end_on_streams(first.transfer);
        if (first.status.ok()) first.status = std::move(ended);
        copied = cuda::Event::record(device_.index, streams_[0]);
      }
      if (all || !first.status.ok()) {
        over = std::move(ring_transfers_.front());
        ring_transfers_.pop_front();
      }
    }
    if (ring_transfers_.empty()) {
      taking_turns_ = false;
      progress = Progress::over;
    }
  }
  if (!over) return progress;
  if (!copied) {
    finish(*over, over->status);
    return progress;
  }
  if (over->transfer.landed && over->status.ok()) complete(std::exchange(over->transfer.landed, {}), {});
  Watcher::of_this_process().when_done(Watch::loosely, std::move(copied),
                                       [self = shared_from_this(), over](const Status& status) {
                                         self->finish(*over, over->status.ok() ? status : over->status);
                                       });
  return progress;
}

void Flow::finish(Driven& driven, Status status) {
  if (driven.transfer.landed) complete(std::move(driven.transfer.landed), status);
  complete(std::move(driven.transfer.done), std::move(status));
}

// As bulk data.

Status Flow::prepare_slots() {
  if (slots_) return {};
  auto memory = SharedMemory::create(bulk_slots * Ring::slot_bytes);
  if (!memory.ok()) return memory.status();
  auto pinned = cuda::Pinned::lock(std::move(*memory), device_.index);
  if (!pinned.ok()) return pinned.status();
  slots_ = std::move(*pinned);
  for (std::size_t i = 0; i < bulk_slots; ++i) free_slots_.push_back(slots_.data() + i * Ring::slot_bytes);
  return {};
}

void Flow::bulk(Transfer transfer) {
  auto driven = std::make_shared<Driven>(Driven{std::move(transfer), 0, 0, 0, {}});
  auto status = Status();
  if (on_gpu()) {
    const OnDevice here(device_.index);
    const std::lock_guard lock(mutex_);
    status = here.status();
    if (status.ok()) status = begin_on_streams(driven->transfer);
    if (status.ok()) status = prepare_slots();
  }
  {
    const std::lock_guard lock(mutex_);
    if (status.ok()) status = closed_;
    if (status.ok()) bulk_.push_back(driven);
    if (status.ok() && driven->transfer.ask) driven->transfer.ask();
  }
  if (!status.ok()) return finish(*driven, std::move(status));
  pump();
}

/// Begins chunks, as many as there are slots for.
void Flow::pump() {
  while (true) {
    DrivenPtr driven;
    std::byte* slot = nullptr;
    std::size_t at = 0;
    std::uint64_t sequence = 0;
    {
      const std::lock_guard lock(mutex_);
      if (bulk_.empty() || !closed_.ok() || (on_gpu() && free_slots_.empty())) return;
      driven = bulk_.front();
      at = driven->begun;
      driven->begun += chunk_at(driven->transfer.memory, at);
      ++driven->pending;
      sequence = next_bulk_++;
      if (driven->begun == driven->transfer.memory.bytes) bulk_.pop_front();
      if (on_gpu()) {
        slot = free_slots_.back();
        free_slots_.pop_back();
      }
    }
    begin_chunk(driven, at, slot, sequence);
  }
}

void Flow::begin_chunk(const DrivenPtr& driven, std::size_t at, std::byte* slot, std::uint64_t sequence) {
  const auto& memory = driven->transfer.memory;
  const auto bytes = chunk_at(memory, at);
  Buffer chunk;
  chunk.data = slot != nullptr ? slot : memory.data + at;
  chunk.bytes = bytes;
  const auto gone = Status(Code::connection_lost, "the link has ended");
  if (direction_ == Direction::in) {
    auto received = [self = shared_from_this(), driven, at, slot](Status status) {
      self->chunk_received(driven, at, slot, std::move(status));
    };
    auto landed = std::make_shared<Completion>(std::move(received));
    if (!wire_->with([&](Wire& wire) {
          wire.receive_bulk(sequence, chunk, [landed](Status status) { (*landed)(std::move(status)); });
        }))
      (*landed)(gone);
    return;
  }
  if (slot == nullptr) return send_chunk(driven, std::move(chunk), slot, sequence);
  const OnDevice here(device_.index);
  const auto result =
      api()->memcpy_async(cuda::address_of(slot), cuda::address_of(memory.data + at), bytes, streams_[0]);
  if (result != CUDA_SUCCESS) return chunk_done(driven, bytes, slot, cuda::status_of(result, "cuda_basic's copy"));
  Watcher::of_this_process().when_done(
      Watch::closely, device_.index, streams_[0],
      [self = shared_from_this(), driven, chunk, slot, sequence](const Status& status) mutable {
        if (!status.ok()) return self->chunk_done(driven, chunk.bytes, slot, status);
        self->send_chunk(driven, std::move(chunk), slot, sequence);
      });
}

void Flow::send_chunk(const DrivenPtr& driven, Buffer chunk, std::byte* slot, std::uint64_t sequence) {
  const auto bytes = chunk.bytes;
  const bool there = wire_->with([&](Wire& wire) {
    wire.send_bulk(sequence, std::move(chunk), [self = shared_from_this(), driven, bytes, slot](const Status& status) {
      self->chunk_done(driven, bytes, slot, status);
    });
  });
  if (!there) chunk_done(driven, bytes, slot, {Code::connection_lost, "the link has ended"});
}

void Flow::chunk_received(const DrivenPtr& driven, std::size_t at, std::byte* slot, Status status) {
  const auto& memory = driven->transfer.memory;
  const auto bytes = chunk_at(memory, at);
  if (slot == nullptr || !status.ok()) return chunk_done(driven, bytes, slot, status);
  const OnDevice here(device_.index);
  const auto result =
      api()->memcpy_async(cuda::address_of(memory.data + at), cuda::address_of(slot), bytes, streams_[0]);
  if (result != CUDA_SUCCESS) return chunk_done(driven, bytes, slot, cuda::status_of(result, "cuda_basic's copy"));
  Watcher::of_this_process().when_done(Watch::closely, device_.index, streams_[0],
                                       [self = shared_from_this(), driven, bytes, slot](const Status& copied) {
                                         self->chunk_done(driven, bytes, slot, copied);
                                       });
}

void Flow::chunk_done(const DrivenPtr& driven, std::size_t bytes, std::byte* slot, const Status& status) {
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    if (slot != nullptr) free_slots_.push_back(slot);
    driven->finished += bytes;
    --driven->pending;
    if (driven->status.ok()) driven->status = status;
    if (driven->status.ok()) driven->status = closed_;
    if (!driven->status.ok()) std::erase(bulk_, driven);
    over = driven->pending == 0 && (!driven->status.ok() || driven->finished == driven->transfer.memory.bytes);
  }
  if (over) finish(*driven, driven->status);
  pump();
}

void Flow::close(Status status) {
  std::vector<DrivenPtr> idle;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_.ok()) return;
    closed_ = status;
    for (auto& driven : bulk_) {
      if (driven->pending == 0) idle.push_back(driven);  // the others end with their last chunk
    }
    bulk_.clear();
  }
  for (const auto& driven : idle) finish(*driven, status);
}

}  // namespace tensorferry::cuda_basic
