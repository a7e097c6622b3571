#include "rpc/collectives/torch/device_group.h"

#include <thread>

#include "base/text.h"

namespace tensorferry::collectives {

namespace {

Status not_captured(std::string_view operation, std::string_view why) {
  return {
      Code::invalid_argument,
      formatted("a CUDA graph is being captured on the current stream, and {} cannot be captured: {}. Call it before "
                "or after the capture",
                operation, why)};
}

}  // namespace

Result<TensorGroup> DeviceGroup::on(std::string_view operation, std::initializer_list<at::TensorList> tensors,
                                    const StartOptions& options) const {
  const auto device = device_of(tensors);
  if (!device.ok()) return device.status();
  if (device->is_cpu()) return host_;
  const bool captured = !refusal_of_capture_on(*device).ok();
  if (captured) {
    const auto why = direct_.why_not_captured(*device);
    if (!why.empty()) return not_captured(operation, why);
  }
  StartOptions first;  // the rest belongs to the operation
  first.timeout = options.timeout;
  first.background = options.background;
  const auto order = direct_.order_on(*device, first, captured);
  if (!order.ok()) return order.status();
  if (!*order) return staged_on(operation, tensors);
  for (const auto& list : tensors) {
    for (const auto& tensor : list) (*order)->use(tensor);
  }
  return TensorGroup(raw().shared_from_this(), TorchAccess(*order));
}

Result<TensorGroup> DeviceGroup::staged_on(std::string_view operation,
                                           std::initializer_list<at::TensorList> tensors) const {
  const auto device = device_of(tensors);
  if (!device.ok()) return device.status();
  if (device->is_cpu()) return host_;
  if (!refusal_of_capture_on(*device).ok()) return not_captured(operation, "it copies through host memory");
  return TensorGroup(raw().shared_from_this(), TorchAccess(std::make_shared<DeviceCopies>(*device)));
}

Status TensorWork::status() const {
  auto status = work_->status();
  return status.ok() && run_ && work_->done() ? run_->status() : status;
}

bool TensorWork::wait(std::optional<Deadline> until, const std::function<bool()>& interrupted) const {
  constexpr std::chrono::microseconds pause{50};
  if (!work_->wait(until, interrupted)) return false;
  while (until && !done()) {
    if (std::chrono::steady_clock::now() >= *until || (interrupted && interrupted())) return done();
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace tensorferry::collectives
