#include "channels/cuda_basic/ring_flow.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "base/mutex.h"
#include "channels/completion.h"
#include "channels/cuda/copy_timer.h"

namespace tensorferry::cuda_basic {

using cuda::api;
using cuda::DeviceGuard;
using cuda::EventPoller;

void RingFlow::use(std::shared_ptr<Ring> ring) {
  const std::lock_guard lock(mutex_);
  if (ring_) return;
  ring_ = std::move(ring);
  used_ = std::chrono::steady_clock::now();
}

std::optional<std::uint64_t> RingFlow::send_by_ring(Transfer& transfer) {
  std::unique_lock lock(mutex_);
  if (!ring_) return std::nullopt;
  used_ = std::chrono::steady_clock::now();
  return send(std::move(transfer), lock);
}

std::shared_ptr<Ring> RingFlow::retire() {
  const std::lock_guard lock(mutex_);
  const bool idle = queue_.empty() && in_flight_.empty() && on_host_ == 0 && !polled_;
  if (!ring_ || !idle || (direction_ == Direction::out && !ring_->emptied(queue_.next()))) return nullptr;
  return std::exchange(ring_, nullptr);
}

std::uint64_t RingFlow::next() {
  const std::lock_guard lock(mutex_);
  return queue_.next();
}

bool RingFlow::used_within(std::chrono::steady_clock::duration time) {
  const std::lock_guard lock(mutex_);
  return !ring_ || std::chrono::steady_clock::now() < used_ + time;
}

void RingFlow::advance() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(polled_, true)) return;
  }
  // This thread enqueues the first two chunks on a GPU at once. Their copies cover the time that the event poller
  // needs to wake.
  if (on_gpu() && poll(2) == EventPoller::Progress::over) return;
  // Each call begins at most a ringful of chunks on a GPU, or one chunk on the host, so that it delays no other poll
  // function.
  const auto most = on_gpu() ? Ring::slots : 1;
  auto& poller = on_gpu() ? EventPoller::of_this_process() : EventPoller::of_host_copies();
  poller.poll_repeatedly([self = shared_from_this(), most] { return self->poll(most); });
}

EventPoller::Progress RingFlow::poll(std::size_t most) {
  using Progress = EventPoller::Progress;
  PollResult progress;
  Completion broken;
  bool over = false;
  {
    std::optional<DeviceGuard> here;
    if (on_gpu()) here.emplace(device_.index);
    std::unique_lock lock(mutex_);
    while (!in_flight_.empty()) {
      const auto copied = in_flight_.front().copied.done();
      if (!copied) break;
      const auto copy = std::move(in_flight_.front());
      in_flight_.pop_front();
      end_chunk(copy.at, copy.driven, *copied, progress);
    }
    if (here && !here->status().ok()) stop(here->status(), progress);
    for (; most > 0 && next_is_there() && !next_waits_for_memory(); --most) begin_chunk(lock, progress);
    if (!progress.broken.ok()) broken = std::move(broken_);
    over = queue_.empty() && in_flight_.empty();
    if (over) polled_ = false;
  }
  for (const auto& driven : progress.landed) complete(std::move(driven->transfer.landed), {});
  finish(progress.over);
  complete(std::move(broken), std::move(progress.broken));
  return over ? Progress::over : progress.any ? Progress::some : Progress::none;
}

/// Returns whether the next chunk is known and its slot is free (sender) or filled (receiver).
bool RingFlow::next_is_there() const {
  if (!ring_ || queue_.due() == nullptr) return false;
  const auto at = Ring::chunk(queue_.next());
  return direction_ == Direction::out ? ring_->free(at.slot).reached(at.value - 1)
                                      : ring_->ready(at.slot).reached(at.value);
}

/// Returns whether the next chunk, which is there, should wait because its memory will perhaps be free soon.
bool RingFlow::next_waits_for_memory() {
  auto& due = *queue_.due();
  if (!on_gpu() || direction_ == Direction::out || due.begun != 0 || !due.copies() || !busy(due)) return false;
  const auto now = std::chrono::steady_clock::now();
  if (!due.due_since) due.due_since = now;
  return queue_.size() == 1 && now < *due.due_since + most_wait;
}

void RingFlow::begin_chunk(std::unique_lock<Mutex>& lock, PollResult& progress) {
  auto& due = *queue_.due();
  if (on_gpu() && due.begun == 0 && due.copies()) due.fail(prepare(due));
  const auto chunk = queue_.begin();
  const auto at = Ring::chunk(chunk.number);
  auto status = chunk.status;
  if (chunk.data != nullptr && chunk.driven->diverted) {
    progress.any = true;
    return copy_on_host(chunk, at);
  }
  if (chunk.data != nullptr && on_gpu()) {
    status = copy_on_stream(chunk, at, progress);
    if (status.ok()) return;
  } else if (chunk.data != nullptr) {
    lock.unlock();  // other threads can add transfers meanwhile
    const bool out = direction_ == Direction::out;
    std::memcpy(out ? ring_->data(at.slot) : chunk.data, out ? chunk.data : ring_->data(at.slot), chunk.bytes);
    lock.lock();
  }
  end_chunk(at, chunk.driven, status, progress);
}

Status RingFlow::copy_on_stream(const Queue::Chunk& chunk, Ring::Chunk at, PollResult& progress) {
  const auto mine = cuda::address_of(chunk.data), there = ring_->on_device(at.slot);
  const bool out = direction_ == Direction::out;
  auto result = api()->memcpy_async(out ? there : mine, out ? mine : there, chunk.bytes, stream_);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "cuda_basic's copy");
  auto copied = cuda::GpuEvent::record(device_.index, stream_);
  if (!copied) return {Code::internal, "the CUDA driver records no event"};
  auto& driven = *chunk.driven;
  if (!out && driven.chunks_left() == 0) {
    result = api()->stream_wait_event(static_cast<CUstream>(driven.transfer.memory.stream), copied.get(), 0);
    driven.fail(cuda::status_of(result, "ordering the receiver behind a copy"));
    if (driven.status.ok()) progress.landed.push_back(chunk.driven);
  }
  in_flight_.push_back({at, std::move(copied), chunk.driven});
  progress.any = true;
  return {};
}

/// Copies a chunk of a diverted transfer on the thread for such copies, so that the event poller goes on.
void RingFlow::copy_on_host(const Queue::Chunk& chunk, Ring::Chunk at) {
  ++on_host_;
  EventPoller::of_host_copies().poll_repeatedly([self = shared_from_this(), chunk, at, from = ring_->data(at.slot)] {
    std::memcpy(chunk.data, from, chunk.bytes);
    PollResult progress;
    {
      const std::lock_guard lock(self->mutex_);
      --self->on_host_;
      self->end_chunk(at, chunk.driven, {}, progress);
    }
    finish(progress.over);
    return EventPoller::Progress::over;
  });
}

/// Ends a chunk and sets the slot's word for the other end. If the sender's copy failed, the chunk never arrives, so
/// the flow stops instead.
void RingFlow::end_chunk(Ring::Chunk at, const DrivenPtr& driven, const Status& copied, PollResult& progress) {
  progress.any = true;
  driven->fail(copied);
  if (direction_ == Direction::in)
    ring_->free(at.slot).set(at.value);
  else if (copied.ok())
    ring_->ready(at.slot).set(at.value);
  else
    stop(copied, progress);
  --driven->pending;
  if (copied.ok()) time(*driven);
  if (driven->over()) progress.over.push_back(driven);
}

/// Times a transfer from the end of its first chunk to the end of its last one. Waits before the first chunk do not
/// count, because they have other causes.
void RingFlow::time(Driven& driven) {
  constexpr auto least = 2 * Ring::slots;  // chunks; with as many, the sender waits for the receiver
  if (direction_ == Direction::in || chunks_of(driven.bytes()) < least) return;
  const auto now = std::chrono::steady_clock::now();
  if (!driven.first_ended) driven.first_ended = now;
  if (!driven.over()) return;
  const std::chrono::duration<double, std::milli> taken = now - *driven.first_ended;
  const auto speed = cuda::gigabytes_per_second(driven.bytes() - chunk_bytes(driven.bytes()), taken.count());
  speed_.store(std::max(speed, speed_.load()));
}

void RingFlow::stop(const Status& status, PollResult& progress) {
  if (queue_.closed()) return;
  progress.broken = status;
  for (auto& driven : queue_.close(status)) progress.over.push_back(std::move(driven));
}

}  // namespace tensorferry::cuda_basic
