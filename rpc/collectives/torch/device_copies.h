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

namespace tensorferry::collectives {

/// The copies of one operation, on a high-priority stream of their own. Copies to the host come after the work that the
/// device's current stream has been given when this was made. Works for every type of device that torch has streams
/// for.
///
/// No function waits for the device. The host memory is page-locked and is torch's: its allocator takes it back when
/// the copies are done. Thread-safe. Failures of the device throw c10::Error.
class DeviceCopies final {
 public:
  /// Returns null if all tensors are on the CPU. InvalidArgument: they are on several devices, or a graph is being
  /// captured on the current stream, so the bytes would exist only when the graph is replayed.
  static Result<std::shared_ptr<DeviceCopies>> of(std::initializer_list<at::TensorList> tensors);
  explicit DeviceCopies(c10::Device device);

  [[nodiscard]] c10::Device device() const { return stream_.device(); }
  [[nodiscard]] const c10::Stream& stream() const noexcept { return stream_; }
  /// Returns uninitialised host memory for a dense tensor of that shape.
  static at::Tensor host_memory_for(const at::Tensor& tensor);
  /// Copies `from`, of the device, to host memory. The bytes are there when arrived() is true.
  void to_host(const at::Tensor& to, const at::Tensor& from);
  /// Returns whether all copies to the host are done.
  [[nodiscard]] bool arrived() const;
  /// Copies `from`, in host memory, to a tensor of the device.
  void to_device(const at::Tensor& to, const at::Tensor& from);
  /// Runs `function` with the stream of the copies as the current one.
  void on_stream(const std::function<void()>& function) const;
  /// The device's current stream of this thread waits for all copies so far.
  void block_current_stream() const;

 private:
  const c10::Stream stream_;
  mutable std::mutex mutex_;
  c10::Event copied_;  // behind the copies to the host; guarded by mutex_
};

}  // namespace tensorferry::collectives
