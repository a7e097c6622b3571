/// The buffers of an incoming message: a sink for each, and the count of those that have not landed.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <new>
#include <utility>
#include <vector>

#include "agent/message.h"
#include "agent/wire/frame.h"
#include "base/out_of_memory.h"
#include "channels/channel.h"
#include "channels/joined_ends.h"

namespace tensorferry {

/// The sink of one buffer. The buffer lands in the caller's memory if that has the right size and device, else in the
/// receive memory of the device type. The sender chooses the device; the channel copies to no other.
class BufferSink final : public Sink {
 public:
  BufferSink(Memory& memory, Device device) : memory_(memory), device_(device) {}

  /// Sets the caller's memory for the buffer. Does nothing if the memory is on another device.
  void use(Buffer into) {
    if (into.device == device_) into_ = std::move(into);
  }
  /// Makes the channel copy instead of handing memory over. For bytes that are parsed: the peer must not be able to
  /// change them afterwards.
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
    if (!adopts()) return false;
    result = std::move(buffer);
    return true;
  }
  [[nodiscard]] bool adopts() const override { return into_.data == nullptr && !copies_; }

  Buffer result;

 private:
  Memory& memory_;
  Device device_;
  Buffer into_;
  bool copies_ = false;
};

/// Counts a message's buffers as they land. `arrived` runs once, when the last one has landed or failed, with the first
/// error; it runs on the thread that lands the last one. add() runs on one thread; landed() may run on any.
///
/// Each pull that is under way holds the message. If all holders drop it before the last one has landed, a pull had no
/// memory to begin or to tell its end: `arrived` runs with ResourceExhausted then, when no channel writes any more.
class IncomingMessage final {
 public:
  using Arrived = UniqueFunction<void(Status, Received)>;

  /// `into`: the caller's memory for the message's buffers, by their index. Takes `arrived` unless it throws.
  IncomingMessage(Bytes&& payload, const std::vector<Buffer>& into, Arrived&& arrived)
      : payload_(std::move(payload)), into_(into), arrived_(std::move(arrived)) {}
  IncomingMessage(const IncomingMessage&) = delete;
  IncomingMessage& operator=(const IncomingMessage&) = delete;
  ~IncomingMessage() {
    if (!arrived_) return;
    try {
      std::exchange(arrived_, {})(out_of_memory::status(), {});
    } catch (const std::bad_alloc&) {
      out_of_memory::release_reserve();
    }
  }

  /// Adds the buffer, or the bundle, of `record`, and returns its sink.
  BufferSink& add(Memory& memory, const wire::BufferRecord& record) {
    auto& arrival = arrivals_.emplace_back(Arrival{{memory, record.destination}, record.index, record.parts});
    buffers_.resize(buffers_.size() + std::max<std::size_t>(1, record.parts.size()));
    ends_.expect(1);
    if (record.parts.empty() && record.index < into_.size()) arrival.sink.use(into_[record.index]);
    return arrival.sink;
  }
  /// Reports that one buffer has landed or failed, or that the frame itself has been processed.
  void landed(const Status& status) {
    auto outcome = ends_.one_ended(status);
    if (!outcome) return;
    Received received{std::move(payload_), {}};
    if (outcome->ok()) {
      received.buffers = std::move(buffers_);
      for (auto& arrival : arrivals_) {
        if (arrival.parts.empty())
          received.buffers[arrival.index] = std::move(arrival.sink.result);
        else
          unpack(arrival, received.buffers);
      }
    }
    std::exchange(arrived_, {})(*std::move(outcome), std::move(received));
  }

 private:
  struct Arrival {
    BufferSink sink;
    std::uint32_t index;
    std::vector<wire::BufferRecord::Part> parts;
  };

  /// Makes each part of a bundle a buffer of its own, which keeps the bundle's memory alive. A part for which `into`
  /// has memory is copied there.
  void unpack(const Arrival& bundle, std::vector<Buffer>& buffers) const {
    const auto& whole = bundle.sink.result;
    std::uint64_t end = 0;
    for (const auto& part : bundle.parts) {
      auto* const data = whole.data + Bundle::next_part(end);
      end = Bundle::next_part(end) + part.bytes;
      const auto* const into = part.index < into_.size() ? &into_[part.index] : nullptr;
      if (into != nullptr && into->data != nullptr && into->device == Device() && into->bytes == part.bytes) {
        if (part.bytes != 0) std::memcpy(into->data, data, part.bytes);
        buffers[part.index] = *into;
      } else {
        buffers[part.index] = {Device(), data, static_cast<std::size_t>(part.bytes), nullptr, whole.owner};
      }
    }
  }

  JoinedEnds ends_{1};            // of the buffers that land, and one for the frame itself
  std::deque<Arrival> arrivals_;  // by record; a deque, because pulls under way hold their addresses
  std::vector<Buffer> buffers_;   // the message's, empty until all have landed
  Bytes payload_;
  std::vector<Buffer> into_;
  Arrived arrived_;
};

}  // namespace tensorferry
