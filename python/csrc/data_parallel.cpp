#include "python/csrc/data_parallel.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "python/csrc/collectives.h"
#include "python/csrc/errors.h"
#include "python/csrc/future.h"
#include "rpc/collectives/torch/data_parallel.h"

namespace tensorferry::python {
namespace {

using collectives::DeviceGroup;
using collectives::GroupError;
using collectives::GroupHook;
using Tensors = std::vector<at::Tensor>;

/// A hook in Python for the C++ reducer: a callable that takes a bucket and returns a future of one tensor.
class PythonHook final : public c10d::CommHookInterface {
 public:
  explicit PythonHook(py::function hook) : hook_(std::move(hook)) {}

  GradFuture runHook(GradBucket& bucket) override {
    const GilHeld gil;
    return hook_(bucket).cast<std::shared_ptr<TorchFuture>>()->fut;  // Python gets a copy, which shares the buffer
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    if (result.isTensor()) return result.toTensor();
    const GilHeld gil;
    const auto object = torch::jit::toPyObject(result);
    if (!THPVariable_Check(object.ptr())) throw std::runtime_error("the hook's result is no tensor");
    return THPVariable_Unpack(object.ptr());
  }

 private:
  const py::function hook_;
};

/// Runs `body(interrupted)`, which returns a Status, without the GIL, and raises what it returns or throws.
template <class Body>
void run_without_gil(const Body& body) {
  Status status;
  {
    const GilReleased released;
    try {
      status = body([&] { return interrupted(released.state()); });
    } catch (const GroupError& error) {
      status = error.status();
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    }
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  check(status);
}

void broadcast(const DeviceGroup& group, const Tensors& tensors, std::size_t root, std::size_t bucket_bytes,
               std::optional<double> timeout) {
  const auto each = options_of(timeout).timeout;
  run_without_gil([&](const auto& interrupted) {
    return collectives::broadcast_coalesced(group, tensors, root, bucket_bytes, each, interrupted);
  });
}

void reduce(const Tensors& parameters, py::function hook, std::size_t bucket_bytes) {
  PythonHook called(std::move(hook));
  run_without_gil([&](const auto& interrupted) {
    reduce_gradients(parameters, called, bucket_bytes, interrupted);
    return Status();
  });
}

/// Returns a future of the same tensor as a Python object, which DistributedDataParallel expects of a hook.
GradFuture for_python(const GradFuture& future) {
  return future->then(
      [](c10::ivalue::Future& done) -> c10::IValue {
        if (done.hasError()) std::rethrow_exception(done.exception_ptr());
        const GilHeld gil;
        return torch::jit::toIValue(py::cast(done.value().toTensor()), c10::PyObjectType::get());
      },
      c10::PyObjectType::get());
}

py::object run_group_hook(std::shared_ptr<DeviceGroup> group, const std::string& name, GradBucket& bucket) {
  std::unique_ptr<GroupHook> hook;
  if (name == "all_reduce") {
    hook = collectives::all_reduce_hook(std::move(group));
  } else {
    hook = collectives::compress_hook(std::move(group), name == "half" ? at::kHalf : at::kBFloat16);
  }
  GradFuture future;
  run_without_gil([&](const auto&) {
    future = for_python(hook->runHook(bucket));  // may run others' callbacks
    return Status();
  });
  return py::cast(std::make_shared<TorchFuture>(std::move(future)));
}

}  // namespace

void bind_data_parallel(py::module_& module) {
  module.def("broadcast_coalesced", &broadcast, py::arg("group"), py::arg("tensors"), py::arg("root"),
             py::arg("bucket_bytes"), py::arg("timeout"), "Broadcasts tensors in buckets, two in flight.");
  module.def("reduce_gradients", &reduce, py::arg("parameters"), py::arg("hook"), py::arg("bucket_bytes"),
             "Runs a hook on buckets of the parameters' gradients, two in flight.");
  module.def("run_group_hook", &run_group_hook, py::arg("group"), py::arg("name"), py::arg("bucket"),
             "Starts the hook all_reduce, half or bfloat16 on a bucket, and returns a future of its result.");
}

}  // namespace tensorferry::python
