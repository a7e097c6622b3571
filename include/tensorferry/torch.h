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

/// As in Python:
///
/// - Strided and sparse tensors, in host memory or on the agent's devices (AgentOptions::devices).
/// - Autograd's history is not sent: a tensor that requires grad arrives as a leaf that requires grad.
/// - A view without gaps is sent from its own memory and keeps its strides. One with gaps is copied first.
/// - Numpy arrays are accepted too.
///
/// Throws InvalidArgument for other tensors (undefined, quantised, nested), and for tensors on devices that the agent
/// does not have; the text says what to send instead.
template <>
struct Value<at::Tensor> {
  static std::string name() { return "tensor"; }
  static void write(ValueWriter& out, const at::Tensor& value);
  static at::Tensor read(ValueReader& in);
};

}  // namespace tensorferry
