#include "python/csrc/torch_calls.h"

#include <pybind11/stl.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/py_rref.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "python/csrc/interpreter.h"

namespace tensorferry::python {
namespace {

namespace rpc = torch::distributed::rpc;
using torch_rpc::TorchMessage;
using torch_rpc::TorchRpcAgent;

/// A pickle of torch's, with the tensors that it names by number.
using Pickled = std::pair<py::bytes, std::vector<at::Tensor>>;

constexpr std::int64_t no_id = -1;  // of a request: torch's agents number them, and ours needs no number

std::vector<char> payload_of(const py::bytes& pickle, bool request) {
  const std::string_view bytes(pickle);
  std::vector<char> payload;
  payload.reserve(bytes.size() + 1);
  if (request) payload.push_back(0);  // not under functions.async_execution
  payload.insert(payload.end(), bytes.begin(), bytes.end());
  return payload;
}

TorchMessage message_of(Pickled pickled, rpc::MessageType type, std::int64_t id) {
  return c10::make_intrusive<rpc::Message>(payload_of(pickled.first, type == rpc::PYTHON_CALL),
                                           std::move(pickled.second), type, id);
}

struct LoadAndRun {
  py::object load;
  py::object run;
};

/// Runs `body`, which needs the GIL. Throws its Python error as an error without Python objects.
template <class Body>
auto with_gil(const Body& body) {
  GilHeld gil;
  try {
    return body();
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(error.what());
  }
}

TorchMessage run(const LoadAndRun& functions, const py::object& loaded, std::int64_t id) {
  return message_of(functions.run(loaded).cast<Pickled>(), rpc::PYTHON_RET, id);
}

/// Unpickles a request. References that it brings must be confirmed by their owners before the function runs, which
/// `confirmed` tells.
py::object load(const LoadAndRun& functions, const rpc::Message& request,
                c10::intrusive_ptr<rpc::JitFuture>& confirmed) {
  auto& references = rpc::RRefContext::getInstance();
  references.recordThreadLocalPendingRRefs();
  try {
    const auto& payload = request.payload();
    auto loaded = functions.load(py::bytes(payload.data() + 1, payload.size() - 1), request.tensors());
    confirmed = references.waitForThreadLocalPendingRRefs();
    return loaded;
  } catch (...) {
    references.clearRecordedPendingRRefsOnError();
    throw;
  }
}

void serve(const std::shared_ptr<LoadAndRun>& functions, const TorchMessage& request,
           const std::function<void(TorchMessage)>& respond) {
  const auto id = request->id();
  c10::intrusive_ptr<rpc::JitFuture> confirmed;
  std::shared_ptr<py::object> waiting;
  TorchMessage response;
  with_gil([&] {
    auto loaded = load(*functions, *request, confirmed);
    if (confirmed->completed() && !confirmed->hasError())
      response = run(*functions, loaded, id);
    else
      waiting = share_with_any_thread(std::move(loaded));
  });
  if (!waiting) return respond(std::move(response));
  confirmed->addCallback([functions, waiting, respond, id](rpc::JitFuture& done) {
    if (done.hasError()) return respond(rpc::createExceptionResponse(done.tryRetrieveErrorMessage(), id));
    TorchMessage late;
    try {
      late = with_gil([&] { return run(*functions, *waiting, id); });
    } catch (const std::exception& error) {
      late = rpc::createExceptionResponse(error, id);
    }
    respond(std::move(late));
  });
}

/// Calls a function of `to`, and returns the pickle of its result. None: a context of distributed autograd is active,
/// whose records torch's own way of calling keeps.
std::optional<Pickled> call(TorchRpcAgent& self, const rpc::WorkerInfo& to, Pickled request, float timeout) {
  if (torch::distributed::autograd::DistAutogradContainer::getInstance().hasValidContext()) return std::nullopt;
  auto message = message_of(std::move(request), rpc::PYTHON_CALL, no_id);
  TorchMessage response;
  {
    const GilReleased released;
    response = self.call(to, std::move(message), timeout, [&] { return interrupted(released.state()); });
  }
  if (!response) {
    describe_interruption("\"" + to.name_ + "\"");
    throw py::error_already_set();
  }
  const auto& payload = response->payload();
  return Pickled(py::bytes(payload.data(), payload.size()), response->tensors());
}

std::pair<rpc::worker_id_t, std::int64_t> id_of_reference(const rpc::PyRRef& reference) {
  const auto id = c10::static_intrusive_pointer_cast<rpc::RRef>(reference.toIValue().toRRef())->rrefId();
  return {id.createdOn_, id.localId_};
}

py::object owned_object(rpc::worker_id_t created_on, std::int64_t number) {
  py::object object;
  const GilReleased released;  // localValue() takes the GIL itself
  const auto owner = rpc::RRefContext::getInstance().getOwnerRRef(rpc::RRefId(created_on, number));
  owner->waitAndThrow();
  object = rpc::PyRRef(rpc::fromRRefInterface(owner->constValue().toRRef())).localValue();
  return object;
}

}  // namespace

torch_rpc::ServePythonCall python_call_server(py::object load, py::object run) {
  const auto functions = share_with_any_thread(LoadAndRun{std::move(load), std::move(run)});
  return [functions](const TorchMessage& request, const std::function<void(TorchMessage)>& respond) {
    serve(functions, request, respond);
  };
}

void bind_torch_calls(py::module_& module,
                      py::class_<TorchRpcAgent, rpc::RpcAgent, std::shared_ptr<TorchRpcAgent>>& agent) {
  agent.def(
      "_call",
      [](TorchRpcAgent& self, const rpc::WorkerInfo& to, const py::bytes& pickle, std::vector<at::Tensor> tensors,
         float timeout) {
        return call(self, to, {pickle, std::move(tensors)}, timeout);
      },
      py::arg("to"), py::arg("pickle"), py::arg("tensors"), py::arg("timeout"));
  module.def("id_of_reference", &id_of_reference, py::arg("reference"));
  module.def("owned_object", &owned_object, py::arg("created_on"), py::arg("number"));
}

}  // namespace tensorferry::python
