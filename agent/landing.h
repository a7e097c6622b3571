/// An incoming message whose buffers are on their way.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/wire/frame.h"
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

  /// `into`: where the message's buffers should land, by their index.
  Landing(Bytes payload, std::vector<Buffer> into, Arrived arrived)
      : payload_(std::move(payload)), into_(std::move(into)), arrived_(std::move(arrived)) {}

  /// Where the buffer of this record lands, or the bundle.
  BufferSink& add(Memory& memory, const wire::BufferRecord& record) {
    left_.fetch_add(1, std::memory_order_relaxed);
    auto& arrival = arrivals_.emplace_back(Arrival{{memory, record.destination}, record.index, record.parts});
    buffers_ += std::max<std::size_t>(1, record.parts.size());
    if (record.parts.empty() && record.index < into_.size()) arrival.sink.use(into_[record.index]);
    return arrival.sink;
  }
  /// One buffer, or the reading of the frame itself, is done with.
  void landed(const Status& status) {
    if (!status.ok()) {
      const std::lock_guard lock(mutex_);
      if (error_.ok()) error_ = status;
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    Received received{std::move(payload_), {}};
    if (error_.ok()) {
      received.buffers.resize(buffers_);
      for (auto& arrival : arrivals_) {
        if (arrival.parts.empty())
          received.buffers[arrival.index] = std::move(arrival.sink.result);
        else
          take_apart(arrival, received.buffers);
      }
    }
    arrived_(std::move(error_), std::move(received));
  }

 private:
  struct Arrival {
    BufferSink sink;
    std::uint32_t index;
    std::vector<wire::BufferRecord::Part> parts;
  };

  /// Each part becomes a buffer of its own, which keeps the bundle's memory as long as it is there.
  void take_apart(const Arrival& bundle, std::vector<Buffer>& buffers) const {
    const auto& whole = bundle.sink.result;
    std::uint64_t end = 0;
    for (const auto& part : bundle.parts) {
      auto* const data = whole.data + Bundle::next_part(end);
      end = Bundle::next_part(end) + part.bytes;
      const auto* const into = part.index < into_.size() ? &into_[part.index] : nullptr;
      if (into != nullptr && into->data != nullptr && into->device == Device() && into->bytes == part.bytes) {
        std::memcpy(into->data, data, part.bytes);
        buffers[part.index] = *into;
      } else {
        buffers[part.index] = {Device(), data, static_cast<std::size_t>(part.bytes), nullptr, whole.owner};
      }
    }
  }

  std::atomic<int> left_{1};      // the reading of the frame
  std::deque<Arrival> arrivals_;  // by record; pulls under way know their addresses
  std::size_t buffers_ = 0;       // of the message
  Bytes payload_;
  std::vector<Buffer> into_;
  Arrived arrived_;
  std::mutex mutex_;
  Status error_;
};

}  // namespace tensorferry
