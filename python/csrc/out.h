/// out=: the memory of the caller's that the tensor which a call returns lands in.
#pragma once

#include <ATen/core/Tensor.h>

#include "agent/agent.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// `object` as what a result may land in. TypeError: no tensor. ValueError: not a plain one on the CPU, or one that
/// requires grad.
at::Tensor checked_out(py::handle object);

/// Has the reply's bytes land in `out` itself, where its elements lie as they travel; the memory is kept until then.
void land_in(const at::Tensor& out, RawCallOptions& options);

/// `out` as Python has it, holding the elements of `result`, which has perhaps landed there already. TypeError: the
/// result is no tensor. ValueError: it has another dtype or shape. Needs the GIL, which it may let go.
py::object bring_into(const at::Tensor& out, const py::object& result);

}  // namespace tensorferry::python
