/// Support for at::Tensor as an argument and a result of typed calls. Include it beside agent.h, and link
/// tensorferry::torch.
///
///     agent->serve("scale", [](const at::Tensor& tensor, double by) { return tensor * by; });
///     auto scaled = agent->call<at::Tensor>("sim", "scale", torch::ones({2, 3}), 2.0).get();
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tensorferry/values.h"

namespace tensorferry {

/// Returns a Tensor in the same memory, which it keeps alive. Lazily conjugated or negated views are copied. Throws
/// InvalidArgument if the tensor is undefined, not strided, not in host memory, or of a dtype that cannot be sent (a
/// quantised one).
Tensor from_torch(const at::Tensor& tensor);

/// Returns an at::Tensor in the same memory, which it keeps alive. Throws InvalidArgument if the tensor is not in host
/// memory, or if this version of torch lacks its dtype.
at::Tensor to_torch(const Tensor& tensor);

/// Autograd's history is not sent: the received tensor does not require grad.
template <>
struct Value<at::Tensor> {
  static std::string name() { return "tensor"; }
  static void write(ValueWriter& out, const at::Tensor& value) { out.tensor(from_torch(value)); }
  static at::Tensor read(ValueReader& in) { return to_torch(in.tensor()); }
};

}  // namespace tensorferry
