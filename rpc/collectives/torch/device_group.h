/// The operations of a group on torch tensors of any device, for every caller: torch.distributed, tensorferry's Python
/// groups, and the hooks of DistributedDataParallel.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "rpc/collectives/torch/direct_order.h"
#include "rpc/collectives/torch/tensor_group.h"

namespace tensorferry::collectives {

/// A group, and its GPUs. All users of a group at one rank share one of these, because the ranks count what they do on
/// GPUs. Thread-safe.
class DeviceGroup final {
 public:
  explicit DeviceGroup(const std::shared_ptr<RawGroup>& group) : host_(group), direct_(group) {}

  [[nodiscard]] RawGroup& raw() const noexcept { return host_.raw(); }
  /// Returns the operations on tensors of the CPU.
  [[nodiscard]] const TensorGroup& on_host() const noexcept { return host_; }
  /// Returns the group for one operation on these tensors, which is started with `options`. Tensors of GPUs stay there
  /// if the ranks reach one another's memory as far as the operation needs it; those of other devices are copied to
  /// host memory and back. At the first operation on a GPU all ranks find out which it is, which blocks.
  /// InvalidArgument: they are on several devices, or a graph is being captured, and it cannot get the operation
  /// (DirectGroup::run_on); the text has the name `operation`. Else the errors of RawGroup.
  [[nodiscard]] Result<TensorGroup> on(std::string_view operation, std::initializer_list<at::TensorList> tensors,
                                       const StartOptions& options) const;
  /// The same for operations that GPUs do not do among themselves: sends, receives, and a program's own reductions. No
  /// graph gets them.
  [[nodiscard]] Result<TensorGroup> staged_on(std::string_view operation,
                                              std::initializer_list<at::TensorList> tensors) const;
  /// Waits until all operations have ended on the devices of all ranks. A rank does so before it leaves the group.
  void drain(const std::function<bool()>& interrupted = {}) const { direct_.drain(interrupted); }

 private:
  const TensorGroup host_;
  mutable DirectOperations direct_;
};

/// An operation that has been started, and the order of its results. Copies share the operation. Thread-safe.
///
/// If GPUs do the operation among themselves, its GroupWork ends when the operation is enqueued. If it fails on the
/// device later, status() tells, and so does every later operation of the group.
class TensorWork final {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  TensorWork(std::shared_ptr<GroupWork> work, const TorchAccess& access)
      : work_(std::move(work)), order_(access.order()), run_(access.direct() ? access.direct()->run() : nullptr) {}

  [[nodiscard]] const std::shared_ptr<GroupWork>& group_work() const noexcept { return work_; }
  /// Returns the order of the results on their device; null for tensors of the CPU.
  [[nodiscard]] const std::shared_ptr<DeviceOrder>& order() const noexcept { return order_; }
  /// Returns whether the operation has ended, on its device too.
  [[nodiscard]] bool done() const { return work_->done() && (!run_ || !work_->status().ok() || run_->ended()); }
  /// Returns the result; Ok before the end.
  [[nodiscard]] Status status() const;
  /// Waits as GroupWork::wait(). With `until`, also for the device.
  [[nodiscard]] bool wait(std::optional<Deadline> until, const std::function<bool()>& interrupted = {}) const;
  /// The device's current stream of this thread waits for the results. Called after a wait() that has returned true.
  void block_current_stream() const {
    if (order_) order_->block_current_stream();
  }

 private:
  std::shared_ptr<GroupWork> work_;
  std::shared_ptr<DeviceOrder> order_;
  std::shared_ptr<cuda::DeviceRun> run_;  // of an operation that GPUs do among themselves; else null
};

}  // namespace tensorferry::collectives
