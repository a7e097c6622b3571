/// The verbs rpc_sync, rpc_async and remote as C functions (METH_FASTCALL): no Python frame and no pybind11 dispatch
/// stands between the user's call and the agent.
#pragma once

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Adds make_method() and make_function() to `module`. The Python package makes the verbs with them, as methods of the
/// class `agent` and as functions for the current agent. It passes the docstrings (calls.py).
void bind_calls(py::module_& module, const py::object& agent);

}  // namespace tensorferry::python
