/// How the memory of torch tensors goes out as buffers and comes back, by type of device.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>

#include "channels/buffer.h"
#include "channels/status.h"

namespace tensorferry {

/// One type of device. Thread-safe. Takes no lock that Python code may run under, and never waits for a device.
class Converter {
 public:
  virtual ~Converter() = default;

  /// `bytes` bytes of `storage` from `offset` on, without a copy. The buffer's owner keeps the storage, and may be
  /// dropped on any thread, also on one that holds no GIL, and after the interpreter's end. The buffer's stream is the
  /// device's current one: what it has been given so far is done before the bytes are read.
  /// InvalidArgument: the storage cannot be sent now.
  virtual Result<Buffer> to_buffer(const c10::Storage& storage, std::size_t offset, std::size_t bytes) = 0;

  /// A received buffer as a storage like any that torch allocates itself: it can be resized, shared between processes,
  /// pickled and sent on. It owns the buffer, and is usable on the device's current stream. The buffer's bytes are the
  /// receiver's alone. InvalidArgument: it cannot be received here now.
  virtual Result<c10::Storage> to_storage(Buffer buffer) = 0;

  /// The stream in whose order a buffer's bytes are valid; nullopt: devices of this type have none.
  [[nodiscard]] virtual std::optional<c10::Stream> stream_of(const Buffer& buffer) const {
    (void)buffer;
    return std::nullopt;
  }

  /// Where received bytes of this device's land: what the agent is given (RawAgentOptions::memory).
  [[nodiscard]] virtual std::shared_ptr<Memory> memory() const = 0;
};

/// The converters of an agent, one a type of device. Filled before use, then only read.
class Converters {
 public:
  /// Replaces an earlier one of the same type.
  void add(DeviceType type, std::shared_ptr<Converter> converter) {
    by_type_.at(static_cast<std::size_t>(type)) = std::move(converter);
  }
  /// Null: tensors on such devices cannot be sent or received.
  [[nodiscard]] Converter* find(DeviceType type) const {
    const auto index = static_cast<std::size_t>(type);
    return index < by_type_.size() ? by_type_[index].get() : nullptr;
  }

 private:
  std::array<std::shared_ptr<Converter>, 2> by_type_;  // one an enumerator of DeviceType
};

}  // namespace tensorferry
