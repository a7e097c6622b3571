// tensorferry._torch_rpc: the agent of torch.distributed.rpc. A module of its own, because a torch without RPC lacks
// the base classes that it needs.

#include <pybind11/stl.h>
#include <torch/csrc/distributed/rpc/request_callback_impl.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "include/tensorferry/plugin.h"
#include "python/csrc/agent_options.h"
#include "python/csrc/interpreter.h"
#include "python/csrc/interruptible.h"
#include "python/csrc/torch_calls.h"
#include "rpc/store_adapter.h"
#include "rpc/torch/rpc_agent.h"

namespace tensorferry::python {
namespace {

using torch_rpc::DeviceMapsByPeer;
using torch_rpc::TorchRpcAgent;
using torch_rpc::TorchRpcSettings;
using torch_rpc::WorkerInfo;
namespace rpc = torch::distributed::rpc;

/// Gives a pool thread a Python thread state until it ends, because torch would make one at each entry. Does nothing on
/// a thread that Python knows already.
class PoolThreadState final {
 public:
  PoolThreadState() {
    if (closing()) sleep_for_ever();
    if (PyGILState_GetThisThreadState() != nullptr) return;
    const auto before = PyGILState_Ensure();
    static_cast<void>(before);  // unlocked, because Python did not know the thread
    state_ = PyEval_SaveThread();
  }
  ~PoolThreadState() {
    if (state_ == nullptr || closing()) return;
    take_gil(state_);
    PyGILState_Release(PyGILState_UNLOCKED);
  }
  PoolThreadState(const PoolThreadState&) = delete;
  PoolThreadState& operator=(const PoolThreadState&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

void prepare_pool_thread() { thread_local const PoolThreadState state; }

bool leaves_storages() { return closing(); }

std::shared_ptr<TorchRpcAgent> create(c10::intrusive_ptr<c10d::Store> store, const std::string& name, int rank,
                                      const py::dict& options, const py::dict& settings) {
  TorchRpcSettings taken;
  taken.world_size = settings["world_size"].cast<int>();
  taken.timeout = milliseconds(settings["timeout"].cast<double>());
  taken.join_timeout = milliseconds(settings["join_timeout"].cast<double>());
  taken.worker_threads = settings["worker_threads"].cast<int>();
  taken.device_maps = settings["device_maps"].cast<DeviceMapsByPeer>();
  taken.reverse_device_maps = settings["reverse_device_maps"].cast<DeviceMapsByPeer>();
  taken.devices = settings["devices"].cast<std::vector<c10::Device>>();
  taken.faults.fail = settings["fail"].cast<std::set<int>>();
  taken.faults.failures = settings["failures"].cast<int>();
  for (const auto& [type, seconds] : settings["delay"].cast<std::map<int, double>>())
    taken.faults.delay.emplace(type, milliseconds(seconds));
  taken.prepare_thread = &prepare_pool_thread;
  taken.leaves_storages = &leaves_storages;
  taken.serve_python_call = python_call_server(settings["load"], settings["run"]);
  auto adapted = std::make_shared<StoreAdapter>(std::move(store));
  auto raw = options_of(name, rank, std::move(adapted), options);
  return interruptible("the other workers to join", [raw = std::move(raw), taken = std::move(taken)]() mutable {
    return TorchRpcAgent::create(std::move(raw), std::move(taken), std::make_unique<rpc::RequestCallbackImpl>());
  });
}

using Names = std::optional<std::vector<std::string>>;
/// Returns the transports and the channels that torch's TensorPipeRpcBackendOptions names; torch's Python has no names
/// for them.
std::pair<Names, Names> tensorpipe_parts(const rpc::TensorPipeRpcBackendOptions& options) {
  return {options.transports, options.channels};
}

/// Makes this module use the list of plugins of tensorferry._C, which has its own copy of the library.
void share_plugins() {
  const auto list = py::module_::import("tensorferry._C").attr("_plugins").cast<py::capsule>();
  Plugins::share(*list.get_pointer<Plugins>());
}

// The order of the overloads is that of torch's own agent; binding one of them hides all of the base class.
void bind_worker_info(py::class_<TorchRpcAgent, rpc::RpcAgent, std::shared_ptr<TorchRpcAgent>>& agent) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  agent
      .def(
          "get_worker_info", [](const TorchRpcAgent& self) { return self.getWorkerInfo(); }, unlocked)
      .def(
          "get_worker_info",
          [](const TorchRpcAgent& self, const std::string& name) { return self.getWorkerInfo(name); },
          py::arg("workerName"), unlocked)
      .def(
          "get_worker_info", [](const TorchRpcAgent& self, rpc::worker_id_t id) { return self.getWorkerInfo(id); },
          py::arg("id"), unlocked);
}

}  // namespace
}  // namespace tensorferry::python

PYBIND11_MODULE(_torch_rpc, module) {
  using namespace tensorferry::python;
  py::module_::import("torch.distributed.rpc");  // knows the base class to Python
  py::class_<TorchRpcAgent, rpc::RpcAgent, std::shared_ptr<TorchRpcAgent>> agent(module, "RpcAgent",
                                                                                 py::dynamic_attr());
  agent.def(py::init(&create), py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("options"),
            py::arg("settings"));
  bind_worker_info(agent);
  bind_torch_calls(module, agent);
  agent
      .def(
          "_get_device_map", [](const TorchRpcAgent& self, const WorkerInfo& to) { return self.getDeviceMap(to); },
          py::arg("dst"), py::call_guard<py::gil_scoped_release>())
      .def("_update_group_membership", &TorchRpcAgent::update_group, py::arg("worker_info"), py::arg("my_devices"),
           py::arg("reverse_device_map"), py::arg("is_join"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_static_group", &TorchRpcAgent::is_static_group);
  module.def("tensorpipe_parts", &tensorpipe_parts, py::arg("options"));
  share_plugins();
  module.def("set_closing", &set_closing, "At the end of the process: our threads do not enter Python afterwards.");
}
