/// Calls of Python functions by torch.distributed.rpc on our agent, without torch's futures on their way. The messages
/// are torch's own (PYTHON_CALL, PYTHON_RET), so each end may also be torch's code.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "rpc/torch/rpc_agent.h"

namespace tensorferry::python {

namespace py = pybind11;

/// Returns what runs the calls of peers. `load(payload, tensors)` unpickles the function with its arguments;
/// `run(loaded)` calls it and returns the (payload, tensors) of its result. Needs the GIL; the result does not.
torch_rpc::ServePythonCall python_call_server(py::object load, py::object run);

/// Binds, for tensorferry/torch_calls.py:
/// - RpcAgent._call: calls a function and waits for the response;
/// - id_of_reference, owned_object: name an object that an RRef refers to, and find it at its owner.
void bind_torch_calls(py::module_& module, py::class_<torch_rpc::TorchRpcAgent, torch::distributed::rpc::RpcAgent,
                                                      std::shared_ptr<torch_rpc::TorchRpcAgent>>& agent);

}  // namespace tensorferry::python
