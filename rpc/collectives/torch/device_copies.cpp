#include "rpc/collectives/torch/device_copies.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <utility>

#include "base/text.h"
#include "converters/cuda.h"

namespace tensorferry::collectives {
namespace {

c10::impl::VirtualGuardImpl implementation_of(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

}  // namespace

Result<c10::Device> device_of(std::initializer_list<at::TensorList> tensors) {
  std::optional<c10::Device> device;
  for (const auto& list : tensors) {
    for (const auto& tensor : list) {
      if (!tensor.defined()) continue;
      if (!device) device = tensor.device();
      if (*device == tensor.device()) continue;
      return Status(Code::invalid_argument,
                    formatted("an operation of a group takes tensors of one device, not of {} and {}", device->str(),
                              tensor.device().str()));
    }
  }
  return device.value_or(c10::Device(c10::kCPU));
}

Status refusal_of_capture_on(c10::Device device) {
  return device.is_cpu() ? Status() : refusal_of_capture(implementation_of(device).getStream(device));
}

DeviceCopies::DeviceCopies(c10::Device device)
    : stream_(implementation_of(device).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      copied_(device.type()) {
  c10::Event given(device.type());
  given.record(implementation_of(device).getStream(device));
  given.block(stream_);
}

at::Tensor DeviceCopies::host_memory_for(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).device(at::kCPU).pinned_memory(true));
}

void DeviceCopies::to_host(const at::Tensor& to, const at::Tensor& from) {
  const c10::StreamGuard here(stream_);
  const c10::InferenceMode mode(from.is_inference());
  const at::NoGradGuard no_grad;
  to.copy_(from.resolve_conj().resolve_neg(), /*non_blocking=*/true);
  from.record_stream(stream_);
  const std::lock_guard lock(mutex_);
  copied_.record(stream_);
}

bool DeviceCopies::arrived() const {
  const std::lock_guard lock(mutex_);
  return has_happened(copied_);
}

void DeviceCopies::to_device(const at::Tensor& to, const at::Tensor& from) {
  const c10::StreamGuard here(stream_);
  const c10::InferenceMode mode(to.is_inference());
  const at::NoGradGuard no_grad;
  to.copy_(from, /*non_blocking=*/true);
  to.record_stream(stream_);
}

void DeviceCopies::on_stream(const std::function<void()>& function) const {
  const c10::StreamGuard here(stream_);
  function();
}

void DeviceCopies::block_current_stream() const {
  c10::Event done(device().type());
  done.record(stream_);
  done.block(implementation_of(device()).getStream(device()));
}

}  // namespace tensorferry::collectives
