/// The interface that converts between torch storages and buffers, and the registry of its implementations by device
/// type.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.h"
#include "channels/buffer.h"

namespace tensorferry {

struct DeviceConverter;  // include/tensorferry/converter.h

/// Converts storages of one device type to buffers and back. Thread-safe. Never waits for a device. Takes no lock under
/// which Python code may run.
class Converter {
 public:
  virtual ~Converter() = default;

  /// Returns a buffer over `bytes` bytes of `storage` at `offset`, without a copy. The buffer's owner keeps the
  /// storage. The owner may be dropped on any thread, with or without the GIL, and after the interpreter has ended. The
  /// buffer's stream is the device's current stream: a reader reads the bytes behind the work that the stream has been
  /// given so far. InvalidArgument: the storage cannot be sent now.
  virtual Result<Buffer> to_buffer(const c10::Storage& storage, std::size_t offset, std::size_t bytes) = 0;

  /// Wraps a received buffer in a storage that behaves like torch's own: a program can resize it, share it between
  /// processes, pickle it and send it on. The storage owns the buffer and is usable on the device's current stream. The
  /// buffer's bytes belong to the receiver alone. InvalidArgument: the buffer cannot be received here now.
  virtual Result<c10::Storage> to_storage(Buffer buffer) = 0;

  /// Returns the stream in whose order a buffer's bytes are valid; nullopt if devices of this type have no streams.
  [[nodiscard]] virtual std::optional<c10::Stream> stream_of(const Buffer& buffer) const {
    (void)buffer;
    return std::nullopt;
  }

  /// Returns the memory in which bytes for devices of this type land; the agent takes it as RawAgentOptions::memory.
  [[nodiscard]] virtual std::shared_ptr<Memory> memory() const = 0;
};

/// The converters of an agent, one per device type. Add all converters before use; then any thread may read.
class Converters {
 public:
  /// Adds a converter; replaces an earlier one of the same type.
  void add(DeviceType type, std::shared_ptr<Converter> converter) {
    by_type_.at(static_cast<std::size_t>(type)) = std::move(converter);
  }
  /// Returns the converter of a device type. Null: tensors on such devices cannot be sent or received.
  [[nodiscard]] Converter* find(DeviceType type) const {
    const auto index = static_cast<std::size_t>(type);
    return index < by_type_.size() ? by_type_[index].get() : nullptr;
  }

  /// Adds the converters of other device types that are registered in this process (include/tensorferry/plugin.h).
  void add_registered();
  /// Returns the registered converter of a device type, whose tensors travel by host memory; null if there is none.
  [[nodiscard]] const DeviceConverter* find_registered(DeviceType type) const;

 private:
  std::array<std::shared_ptr<Converter>, 2> by_type_;  // indexed by DeviceType
  std::vector<std::pair<DeviceType, std::shared_ptr<const DeviceConverter>>> registered_;
};

}  // namespace tensorferry
