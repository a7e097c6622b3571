/// `out=`: receives the tensor that a call returns in a tensor that the caller provides. All functions need the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include "agent/agent.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

class PythonAgent;

/// Checks that a result may land in `object`, and returns it as a tensor. TypeError: not a tensor. ValueError: not a
/// dense tensor, not on the CPU or one of the agent's GPUs, or one that requires grad.
at::Tensor checked_out(py::handle object, const PythonAgent& agent);

/// Sets the options so that the reply lands on the device of `out`. If the elements of `out` lie in memory as they
/// travel, the reply lands in `out` itself; on a GPU, in the order of the current stream. The options keep the memory
/// until then. Raises if a CUDA graph is being captured on that stream.
void land_in(const at::Tensor& out, const PythonAgent& agent, RawCallOptions& options);

/// Returns `out` as a Python object that holds the elements of `result`; copies them unless they have landed there.
/// TypeError: the result is not a tensor. ValueError: it has another dtype or shape, or is sparse. Needs the GIL, and
/// releases it for long copies.
py::object bring_into(const at::Tensor& out, const py::object& result);

}  // namespace tensorferry::python
