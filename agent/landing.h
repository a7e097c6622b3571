/// An incoming message whose buffers are on their way.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "channels/channel.h"

namespace tensorferry {

/// Where one buffer lands: the caller's memory when it is of the right size and on the right device, else the device
/// type's pool. Which device that is says the sender: the channel copies to no other.
class BufferSink final : public Sink {
 public:
  BufferSink(Memory& memory, Device device) : memory_(memory), device_(device) {}

  void use(Buffer into) {
    if (into.device == device_) into_ = std::move(into);
  }
  /// The bytes are going to be parsed: they must not lie where the peer can still write.
  void copy() { copies_ = true; }

  std::optional<Buffer> reserve(std::size_t bytes) override {
    if (into_.data != nullptr && into_.bytes == bytes) {
      result = into_;
    } else {
      result = memory_.allocate(bytes, device_);
      if (result.data == nullptr && bytes != 0) return std::nullopt;
    }
    return result;
  }
  bool adopt(Buffer buffer) override {
    if (into_.data != nullptr || copies_) return false;
    result = std::move(buffer);
    return true;
  }

  Buffer result;

 private:
  Memory& memory_;
  Device device_;
  Buffer into_;
  bool copies_ = false;
};

/// Counts its buffers in; `arrived` runs once, when the last one has landed or failed, with the first error.
class Landing final {
 public:
  using Arrived = UniqueFunction<void(Status, Received)>;

  Landing(Bytes payload, Arrived arrived) : payload_(std::move(payload)), arrived_(std::move(arrived)) {}

  BufferSink& add(Memory& memory, Device device) {
    left_.fetch_add(1, std::memory_order_relaxed);
    return *sinks_.emplace_back(std::make_unique<BufferSink>(memory, device));
  }
  void set_payload(Bytes payload) { payload_ = std::move(payload); }
  /// One buffer, or the reading of the frame itself, is done with.
  void landed(const Status& status) {
    if (!status.ok()) {
      const std::lock_guard lock(mutex_);
      if (error_.ok()) error_ = status;
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    Received received{std::move(payload_), {}};
    received.buffers.reserve(sinks_.size());
    for (auto& sink : sinks_) received.buffers.push_back(std::move(sink->result));
    arrived_(std::move(error_), std::move(received));
  }

 private:
  std::atomic<int> left_{1};  // the reading of the frame
  std::vector<std::unique_ptr<BufferSink>> sinks_;
  Bytes payload_;
  Arrived arrived_;
  std::mutex mutex_;
  Status error_;
};

}  // namespace tensorferry
