/// Carries the tensors of one operation of a group from a device to host memory and back.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>

#include "base/status.h"
#include "rpc/collectives/torch/device_order.h"

namespace tensorferry::collectives {

/// The copies of one operation, on a high-priority stream of their own. Copies to the host come after the work that the
/// device's current stream has been given when this was made. Works for every type of device that torch has streams
/// for.
///
/// No function waits for the device. The host memory is page-locked and is torch's: its allocator takes it back when
/// the copies are done. Thread-safe. Failures of the device throw c10::Error.
class DeviceCopies final : public DeviceOrder {
 public:
  explicit DeviceCopies(c10::Device device);

  [[nodiscard]] c10::Device device() const override { return stream_.device(); }
  [[nodiscard]] const c10::Stream& stream() const override { return stream_; }
  /// Returns uninitialised host memory for a dense tensor of that shape.
  static at::Tensor host_memory_for(const at::Tensor& tensor);
  /// Copies `from`, of the device, to host memory. The bytes are there when arrived() is true.
  void to_host(const at::Tensor& to, const at::Tensor& from);
  /// Returns whether all copies to the host are done.
  [[nodiscard]] bool arrived() const;
  /// Copies `from`, in host memory, to a tensor of the device.
  void to_device(const at::Tensor& to, const at::Tensor& from);
  void on_stream(const std::function<void()>& function) const override;
  void block_current_stream() const override;

 private:
  const c10::Stream stream_;
  mutable std::mutex mutex_;
  c10::Event copied_;  // behind the copies to the host; guarded by mutex_
};

/// Returns the device of the tensors of one operation. InvalidArgument: they are on several devices.
Result<c10::Device> device_of(std::initializer_list<at::TensorList> tensors);
/// Ok; or InvalidArgument if a graph is being captured on the device's current stream, so the bytes would exist only
/// when the graph is replayed.
Status refusal_of_capture_on(c10::Device device);

}  // namespace tensorferry::collectives
