/// at::Tensor as an argument and a result of typed calls: include it beside agent.h, and link tensorferry::torch.
///
///     agent->serve("scale", [](const at::Tensor& tensor, double by) { return tensor * by; });
///     auto scaled = agent->call<at::Tensor>("sim", "scale", torch::ones({2, 3}), 2.0).get();
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tensorferry/values.h"

namespace tensorferry {

/// The same memory as a Tensor, which keeps it alive. Conjugated and negated views are copied. InvalidArgument: not in
/// host memory, not strided, or of a dtype that does not travel (a quantised one).
Tensor from_torch(const at::Tensor& tensor);

/// The same memory as a tensor of torch's, which keeps it alive. InvalidArgument: not in host memory, or of a dtype
/// that this version of torch has not.
at::Tensor to_torch(const Tensor& tensor);

/// Without its history: what arrives requires no grad.
template <>
struct Value<at::Tensor> {
  static std::string name() { return "tensor"; }
  static void write(ValueWriter& out, const at::Tensor& value) { out.tensor(from_torch(value)); }
  static at::Tensor read(ValueReader& in) { return to_torch(in.tensor()); }
};

}  // namespace tensorferry
