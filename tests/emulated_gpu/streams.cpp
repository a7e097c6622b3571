#include "tests/emulated_gpu/streams.h"

#include <algorithm>
#include <utility>

namespace emulated {

Streams& Streams::of_this_process() {
  static auto& streams = *new Streams;
  return streams;
}

Stream* Streams::make(bool blocking) {
  const std::lock_guard lock(mutex_);
  return streams_.emplace_back(std::make_shared<Stream>(blocking)).get();
}

void Streams::destroy(Stream* stream) {
  const std::lock_guard lock(mutex_);
  const auto it =
      std::find_if(streams_.begin(), streams_.end(), [&](const auto& each) { return each.get() == stream; });
  if (it == streams_.end()) return;
  destroyed_.push_back(std::move(*it));
  streams_.erase(it);
}

void Streams::add(Stream* stream, Operation operation) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return draining_ == 0; });
  if (stream == &default_) {
    for (const auto& other : streams_) {
      if (!other->blocking || other->operations.empty()) continue;
      auto point = std::make_shared<Point>();
      other->operations.emplace_back([point] { return point->reached = true; });
      default_.operations.emplace_back([point] { return point->reached.load(); });
    }
  }
  stream->operations.push_back(std::move(operation));
  if (!std::exchange(alive_, true)) std::thread([this] { run(); }).detach();
  changed_.notify_all();
}

bool Streams::idle(Stream* stream) {
  const std::lock_guard lock(mutex_);
  const auto done = [](const auto& each) { return !each->blocking || each->operations.empty(); };
  return stream->operations.empty() && (stream != &default_ || std::all_of(streams_.begin(), streams_.end(), done));
}

bool Streams::capturing(Stream* stream) {
  const std::lock_guard lock(mutex_);
  const auto blocks = [](const auto& each) { return each->blocking && each->capturing; };
  return stream == &default_ ? std::any_of(streams_.begin(), streams_.end(), blocks) : stream->capturing;
}

void Streams::capture(Stream* stream, bool on) {
  const std::lock_guard lock(mutex_);
  stream->capturing = on;
}

void Streams::drain() {
  std::unique_lock lock(mutex_);
  const auto done = [](const auto& each) { return each->operations.empty(); };
  ++draining_;
  changed_.wait(lock,
                [&] { return default_.operations.empty() && std::all_of(streams_.begin(), streams_.end(), done); });
  --draining_;
  changed_.notify_all();
}

void Streams::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    std::vector<std::shared_ptr<Stream>> all = streams_;
    all.insert(all.end(), destroyed_.begin(), destroyed_.end());
    all.emplace_back(std::shared_ptr<Stream>(), &default_);
    bool any = false, waits = false;
    for (const auto& stream : all) {
      while (!stream->operations.empty()) {
        const auto operation = stream->operations.front();
        lock.unlock();
        const bool done = operation();
        lock.lock();
        if (!done) {
          waits = true;
          break;
        }
        stream->operations.pop_front();
        any = true;
      }
    }
    std::erase_if(destroyed_, [](const auto& each) { return each->operations.empty(); });
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
