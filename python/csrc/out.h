/// out=: the memory of the caller's that the tensor which a call returns lands in.
#pragma once

#include <ATen/core/Tensor.h>

#include "agent/agent.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

class PythonAgent;

/// `object` as what a result may land in. TypeError: no tensor. ValueError: not a plain one on the CPU or one of the
/// agent's GPUs, or one that requires grad.
at::Tensor checked_out(py::handle object, const PythonAgent& agent);

/// Has the reply land on `out`'s device, and in `out` itself where its elements lie as they travel, on a GPU in the
/// order of the current stream; the memory is kept until then. Raises where a CUDA graph is being captured on that.
void land_in(const at::Tensor& out, const PythonAgent& agent, RawCallOptions& options);

/// `out` as Python has it, holding the elements of `result`, which has perhaps landed there already. TypeError: the
/// result is no tensor. ValueError: it has another dtype or shape. Needs the GIL, which it may let go.
py::object bring_into(const at::Tensor& out, const py::object& result);

}  // namespace tensorferry::python
