/// How an operation of a group on tensors of a device is ordered with the device's streams.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>

namespace tensorferry::collectives {

/// The order of one operation. Thread-safe. Failures of the device throw c10::Error.
class DeviceOrder {
 public:
  virtual ~DeviceOrder() = default;
  [[nodiscard]] virtual c10::Device device() const = 0;
  [[nodiscard]] virtual const c10::Stream& stream() const = 0;
  /// Runs `function` with the operation's stream as the current one.
  virtual void on_stream(const std::function<void()>& function) const = 0;
  /// The device's current stream of this thread waits for the results. Called after the operation's GroupWork has ended
  /// well.
  virtual void block_current_stream() const = 0;
};

}  // namespace tensorferry::collectives
