/// The verbs rpc_sync, rpc_async and remote as C functions (METH_FASTCALL): no Python frame and no pybind11 dispatch
/// stands between the user's call and the agent.
#pragma once

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Adds the verbs to `module`, for the current agent, and as methods to the class `agent`, for one instance.
void bind_calls(py::module_& module, const py::object& agent);

}  // namespace tensorferry::python
