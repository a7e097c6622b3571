#include "rpc/collectives/torch/direct_order.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "converters/cuda.h"

namespace tensorferry::collectives {
namespace {

c10::impl::VirtualGuardImpl implementation_of(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }
c10::Stream current_stream(c10::Device device) { return implementation_of(device).getStream(device); }

}  // namespace

DirectOrder::DirectOrder(cuda::DirectGroup& group, c10::Device device, const c10::Stream* own, bool captured)
    : stream_(own != nullptr ? *own : current_stream(device)),
      in_background_(own != nullptr),
      captured_(captured),
      run_(group.run_on(device.index(), native_handle(stream_))),
      end_(device.type()) {
  if (!in_background_) return;
  c10::Event given(device.type());
  given.record(current_stream(device));
  given.block(stream_);
}

void DirectOrder::on_stream(const std::function<void()>& function) const {
  const c10::StreamGuard here(stream_);
  function();
}

void DirectOrder::use(const at::Tensor& tensor) const {
  if (in_background_ && tensor.defined()) tensor.record_stream(stream_);
}

void DirectOrder::enqueued() {
  if (!in_background_) return;
  const std::lock_guard lock(mutex_);
  end_.record(stream_);
}

void DirectOrder::block_current_stream() const {
  const auto current = current_stream(device());
  if (current == stream_) return;
  const std::lock_guard lock(mutex_);
  if (!in_background_) end_.record(stream_);
  end_.block(current);
}

std::string DirectOperations::why_not_captured(c10::Device device) const {
  if (device.type() != c10::kCUDA) return "tensors of this device are copied through host memory";
  return group_->why_not_captured(device.index());
}

Result<std::shared_ptr<DirectOrder>> DirectOperations::order_on(c10::Device device, const StartOptions& options,
                                                                bool captured) {
  if (device.type() != c10::kCUDA) return std::shared_ptr<DirectOrder>();
  if (captured) return std::make_shared<DirectOrder>(*group_, device, nullptr, true);
  report_released_memory();  // the ranks may map inputs of one another
  const auto staged = group_->prepare(device.index(), options);
  if (!staged.ok()) return staged.status();
  if (!staged->empty()) return std::shared_ptr<DirectOrder>();
  if (!options.background) return std::make_shared<DirectOrder>(*group_, device, nullptr, false);
  const std::lock_guard lock(mutex_);
  auto it = streams_.find(device.index());
  if (it == streams_.end()) {
    const auto made = implementation_of(device).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    it = streams_.emplace(device.index(), made).first;
  }
  return std::make_shared<DirectOrder>(*group_, device, &it->second, false);
}

}  // namespace tensorferry::collectives
