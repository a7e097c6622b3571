#include "rpc/collectives/torch/tensor_group.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <utility>

#include "base/text.h"
#include "rpc/tensor.h"

namespace tensorferry::collectives {
namespace {
std::atomic<bool> keeps_tensors{false};
}  // namespace

void keep_tensors_from_now() { keeps_tensors.store(true, std::memory_order_release); }

bool tensors_are_kept() noexcept { return keeps_tensors.load(std::memory_order_acquire); }

void TorchAccess::release(std::vector<at::Tensor> tensors) {
  if (tensors_are_kept()) (void)new std::vector<at::Tensor>(std::move(tensors));
}

template class TensorOperations<TorchAccess>;

Status TorchAccess::check(const at::Tensor& tensor) const {
  const auto refused = [](std::string_view why) { return Status(Code::invalid_argument, std::string(why)); };
  if (!tensor.defined()) return refused("a group takes no undefined tensor");
  if (tensor.layout() != at::kStrided) return refused("a group takes dense tensors: this one is sparse");
  const auto on = order();
  const auto device = on ? on->device() : c10::Device(c10::kCPU);
  if (tensor.device() != device) {
    return refused(formatted("the operation takes tensors of {}, not of {}", device.str(), tensor.device().str()));
  }
  if (!dtype_of(tensor.scalar_type())) return refused("a group takes no quantised tensor");
  return {};
}

DType TorchAccess::dtype(const at::Tensor& tensor) { return *dtype_of(tensor.scalar_type()); }
std::size_t TorchAccess::elements(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

bool TorchAccess::is_dense(const at::Tensor& tensor) const {
  return (direct_ || tensor.device().is_cpu()) && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor TorchAccess::dense(const at::Tensor& tensor) const {
  if (tensor.device().is_cpu()) return tensor.resolve_conj().resolve_neg().contiguous();
  if (direct_) {
    at::Tensor dense;
    direct_->on_stream([&] { dense = tensor.resolve_conj().resolve_neg().contiguous(); });
    return dense;
  }
  auto out = empty_like(tensor);
  copies_->to_host(out, tensor);
  return out;
}

at::Tensor TorchAccess::empty_like(const at::Tensor& tensor) const {
  if (direct_) {
    at::Tensor made;
    direct_->on_stream([&] { made = at::empty(tensor.sizes(), tensor.options()); });
    return made;
  }
  if (!tensor.device().is_cpu()) return DeviceCopies::host_memory_for(tensor);
  return at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
}

void TorchAccess::copy(const at::Tensor& to, const at::Tensor& from) const {
  if (direct_) {
    return direct_->on_stream([&] {
      const c10::InferenceMode mode(to.is_inference());
      const at::NoGradGuard no_grad;
      to.copy_(from);
    });
  }
  if (!to.device().is_cpu()) return copies_->to_device(to, from);
  if (!from.device().is_cpu()) return copies_->to_host(to, from);
  // `to` may come from inference mode, which the thread that ends an operation is not in.
  const c10::InferenceMode mode(to.is_inference());
  const at::NoGradGuard no_grad;
  to.copy_(from);
}

std::span<std::byte> TorchAccess::bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

StartOptions TorchAccess::arrange(StartOptions options) const {
  if (copies_) {
    options.arrived = [copies = copies_] { return copies->arrived(); };
    options.staged = true;
  }
  if (direct_) {
    options.device = direct_->run();
    if (direct_->captured()) options.background = false;  // the thread that captures runs it
    options.finish = [direct = direct_, then = std::move(options.finish)] {
      if (then) then();
      direct->enqueued();
    };
  }
  return options;
}

TensorGroup::Started TensorGroup::all_reduce_coalesced(const Tensors& tensors, ReduceOp op,
                                                       StartOptions options) const {
  const auto order = access().order();
  if (!order || tensors.size() < 2) {
    return TensorOperations::all_reduce_coalesced(tensors, std::move(op), std::move(options));
  }
  if (auto status = check_each(tensors); !status.ok()) return status;
  if (auto status = check_coalesced(given(tensors), op); !status.ok()) return status;
  at::Tensor joined;
  order->on_stream([&] {
    const at::NoGradGuard no_grad;
    Tensors flat;
    for (const auto& tensor : tensors) {
      flat.push_back(tensor.reshape({-1}));
      tensor.record_stream(order->stream());
    }
    joined = at::cat(flat);
  });
  options.finish = [order, joined, tensors, then = std::move(options.finish)] {
    order->on_stream([&] {
      const at::NoGradGuard no_grad;
      std::int64_t at = 0;
      for (const auto& tensor : tensors) {
        const c10::InferenceMode mode(tensor.is_inference());
        tensor.copy_(joined.narrow(0, at, tensor.numel()).view(tensor.sizes()));
        at += tensor.numel();
      }
    });
    if (then) then();
  };
  return all_reduce(joined, joined, std::move(op), std::move(options));
}

Result<std::vector<at::Tensor>> rows_of(const at::Tensor& tensor, std::size_t ranks,
                                        const std::vector<std::int64_t>& counts) {
  const auto rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<at::Tensor> out;
  if (!counts.empty() && counts.size() != ranks) {
    return Status(Code::invalid_argument, formatted("there are {} split sizes for {} ranks", counts.size(), ranks));
  }
  if (tensor.dim() == 0 && ranks == 1) return std::vector<at::Tensor>{tensor};
  std::int64_t at = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const auto count = counts.empty() ? rows / static_cast<std::int64_t>(ranks) : counts[rank];
    if (count < 0 || at + count > rows) break;
    out.push_back(tensor.narrow(0, at, count));
    at += count;
  }
  if (out.size() == ranks && at == rows) return out;
  return Status(Code::invalid_argument, formatted("{} rows do not divide among {} ranks", rows, ranks));
}

}  // namespace tensorferry::collectives
