/// The operations of a group that GPUs do among themselves (rpc/collectives/cuda), in the order of torch's streams.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "rpc/collectives/cuda/direct_group.h"
#include "rpc/collectives/torch/device_order.h"

namespace tensorferry::collectives {

/// The order of one direct operation.
///
/// An operation that its caller waits for at once runs on the stream that was current at the call. One in the
/// background runs on a stream of the group, after what the current stream had at the call, so that it does not hold up
/// the caller's later work.
class DirectOrder final : public DeviceOrder {
 public:
  /// `own`: the group's stream for operations in the background; null: the operation runs on the current stream.
  /// `captured`: a CUDA graph is being captured there, and gets the operation.
  DirectOrder(cuda::DirectGroup& group, c10::Device device, const c10::Stream* own, bool captured);

  [[nodiscard]] c10::Device device() const override { return stream_.device(); }
  [[nodiscard]] const c10::Stream& stream() const override { return stream_; }
  void on_stream(const std::function<void()>& function) const override;
  void block_current_stream() const override;

  /// Lets the allocator reuse the tensor's memory only after the operation.
  void use(const at::Tensor& tensor) const;
  /// The whole operation is on the stream.
  void enqueued();
  [[nodiscard]] const std::shared_ptr<cuda::DeviceRun>& run() const noexcept { return run_; }
  [[nodiscard]] bool captured() const noexcept { return captured_; }

 private:
  const c10::Stream stream_;
  const bool in_background_, captured_;
  const std::shared_ptr<cuda::DeviceRun> run_;
  mutable std::mutex mutex_;
  // Behind the operation; guarded by mutex_. On the caller's stream it is recorded only if another stream has to wait,
  // and then behind what the stream has been given since.
  mutable c10::Event end_;
};

/// The direct operations of one process group. Thread-safe.
class DirectOperations final {
 public:
  explicit DirectOperations(std::shared_ptr<RawGroup> group) : group_(cuda::DirectGroup::of(std::move(group))) {}

  /// Returns the order for an operation on tensors of `device`; null if operations there go through host memory. At the
  /// first operation on a device all ranks find that out, which blocks. Errors are those of
  /// cuda::DirectGroup::prepare(). `captured`: a CUDA graph is being captured on the current stream, and gets the
  /// operation on it; why_not_captured() has returned the empty text.
  Result<std::shared_ptr<DirectOrder>> order_on(c10::Device device, const StartOptions& options, bool captured);
  /// Returns why operations on `device` cannot be captured into graphs; empty if they can.
  [[nodiscard]] std::string why_not_captured(c10::Device device) const;
  /// Waits until all operations have ended on the devices.
  void drain(const std::function<bool()>& interrupted) { group_->drain(interrupted); }

 private:
  const std::shared_ptr<cuda::DirectGroup> group_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;  // for operations in the background; guarded by mutex_
};

}  // namespace tensorferry::collectives
