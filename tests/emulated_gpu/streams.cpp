#include "tests/emulated_gpu/streams.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <utility>

namespace emulated {

Streams& Streams::of_this_process() {
  static auto& streams = *new Streams;
  return streams;
}

Streams::Streams() {
  for (auto& each : default_) each.queue = std::make_shared<Queue>();
  const auto* const text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const int queues = text == nullptr ? 0 : std::atoi(text);
  for (auto& of_device : shared_) {
    for (int i = 0; i < queues; ++i) of_device.push_back(std::make_shared<Queue>());
  }
}

Stream* Streams::make(int device, bool blocking) {
  const std::lock_guard lock(mutex_);
  const auto& stream = streams_.emplace_back(std::make_shared<Stream>(device, blocking));
  const auto& queues = shared_.at(static_cast<std::size_t>(device));
  auto& made = made_.at(static_cast<std::size_t>(device));
  stream->queue = queues.empty() ? std::make_shared<Queue>() : queues[made++ % queues.size()];
  return stream.get();
}

void Streams::destroy(Stream* stream) {
  const std::lock_guard lock(mutex_);
  const auto it =
      std::find_if(streams_.begin(), streams_.end(), [&](const auto& each) { return each.get() == stream; });
  if (it == streams_.end()) return;
  if ((*it)->pending != 0) destroyed_.push_back(std::move(*it));
  streams_.erase(it);
}

void Streams::push(Stream* stream, Operation operation) {
  stream->queue->operations.emplace_back(stream, std::move(operation));
  ++stream->pending;
}

Enqueued Streams::add(Stream* stream, Operation operation) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return draining_ == 0; });
  if (stream == default_stream(stream->device)) {
    bool captured = false;
    for (const auto& other : streams_) {
      if (!other->blocking || other->device != stream->device || !other->capture) continue;
      other->capture->invalid = captured = true;
    }
    if (captured) return Enqueued::capture_implicit;
    for (const auto& other : streams_) {
      if (!other->blocking || other->device != stream->device || other->pending == 0) continue;
      auto point = std::make_shared<Point>();
      push(other.get(), [point] { return point->reached = true; });
      push(stream, [point] { return point->reached.load(); });
    }
  }
  if (stream->capture) {
    if (stream->capture->invalid) return Enqueued::capture_invalid;
    stream->capture->graph->nodes.push_back(std::move(operation));
    return Enqueued::in_graph;
  }
  push(stream, std::move(operation));
  if (!std::exchange(alive_, true)) std::thread([this] { run(); }).detach();
  changed_.notify_all();
  return Enqueued::on_stream;
}

bool Streams::idle(Stream* stream) {
  const std::lock_guard lock(mutex_);
  const auto done = [&](const auto& each) {
    return !each->blocking || each->device != stream->device || each->pending == 0;
  };
  const bool by_default = stream == default_stream(stream->device);
  return stream->pending == 0 && (!by_default || std::all_of(streams_.begin(), streams_.end(), done));
}

CapturePtr Streams::capture_of(Stream* stream) {
  const std::lock_guard lock(mutex_);
  if (stream != default_stream(stream->device)) return stream->capture;
  for (const auto& each : streams_) {
    if (each->blocking && each->device == stream->device && each->capture) return each->capture;
  }
  return nullptr;
}

void Streams::capture(Stream* stream, CapturePtr capture) {
  const std::lock_guard lock(mutex_);
  stream->capture = std::move(capture);
}

std::unique_ptr<Graph> Streams::end_capture(Stream* stream) {
  const std::lock_guard lock(mutex_);
  const auto ended = stream->capture;
  if (!ended) return nullptr;
  for (const auto& each : streams_) {
    if (each->capture == ended) each->capture.reset();
  }
  return ended->invalid ? nullptr : std::move(ended->graph);
}

void Streams::invalidate(const CapturePtr& capture) {
  const std::lock_guard lock(mutex_);
  capture->invalid = true;
}

bool Streams::invalidate_global() {
  const std::lock_guard lock(mutex_);
  bool any = false;
  for (const auto& each : streams_) {
    if (each->capture && each->capture->global) any = each->capture->invalid = true;
  }
  return any;
}

void Streams::drain() {
  std::unique_lock lock(mutex_);
  const auto none = [](const auto& streams) {
    return std::all_of(streams.begin(), streams.end(), [](const auto& each) { return each->pending == 0; });
  };
  const auto idle = [](const Stream& each) { return each.pending == 0; };
  ++draining_;
  changed_.wait(
      lock, [&] { return std::all_of(default_.begin(), default_.end(), idle) && none(streams_) && none(destroyed_); });
  --draining_;
  changed_.notify_all();
}

/// Runs the queue's operations until one must wait; returns false then.
bool Streams::run_queue(Queue& queue, std::unique_lock<std::mutex>& lock, bool& any) {
  while (!queue.operations.empty()) {
    auto& operation = queue.operations.front().second;  // others only add behind it
    lock.unlock();
    const bool done = operation();
    lock.lock();
    if (!done) return false;
    --queue.operations.front().first->pending;
    queue.operations.pop_front();
    any = true;
  }
  return true;
}

void Streams::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    std::set<std::shared_ptr<Queue>> queues;
    for (const auto& each : default_) queues.insert(each.queue);
    for (const auto* streams : {&streams_, &destroyed_}) {
      for (const auto& each : *streams) queues.insert(each->queue);
    }
    bool any = false, waits = false;
    for (const auto& queue : queues) waits = !run_queue(*queue, lock, any) || waits;
    std::erase_if(destroyed_, [](const auto& each) { return each->pending == 0; });
    if (any) {
      changed_.notify_all();
    } else if (waits) {
      changed_.wait_for(lock, std::chrono::microseconds(50));
    } else {
      changed_.wait(lock);
    }
  }
}

}  // namespace emulated
