/// rpc_sync, rpc_async and remote as C functions (METH_FASTCALL): no Python frame and no pybind11 dispatch between the
/// user's call and the agent.
#pragma once

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Module functions for the current agent, and methods of the class `agent` for one of its instances.
void bind_calls(py::module_& module, const py::object& agent);

}  // namespace tensorferry::python
