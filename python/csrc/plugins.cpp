#include "python/csrc/plugins.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "include/tensorferry/converter.h"
#include "python/csrc/collectives.h"
#include "python/csrc/errors.h"
#include "python/csrc/interruptible.h"

namespace tensorferry::python {
namespace {

constexpr const char* list_name = "tensorferry.Plugins";
constexpr const char* origin = "Python";

/// Calls a function of Python's on any thread, and returns the tensor that it returns. Throws std::runtime_error with
/// the text of what it raises.
template <class... Arguments>
at::Tensor tensor_from(const py::function& function, const Arguments&... arguments) {
  if (closing()) throw std::runtime_error("Python is about to end");
  const GilHeld gil;
  try {
    return function(arguments...).template cast<at::Tensor>();
  } catch (py::error_already_set& error) {
    throw std::runtime_error(error.what());
  }
}

at::Device device_named(const std::string& text) {
  try {
    return at::Device(text);
  } catch (const c10::Error& error) {
    throw py::value_error(error.what_without_backtrace());
  }
}

void register_converter(const std::string& device_type, py::function to_host, py::function from_host) {
  const auto type = device_named(device_type).type();
  DeviceConverter converter;
  converter.to_host = [function = share_with_any_thread(std::move(to_host))](const at::Tensor& tensor) {
    return tensor_from(*function, tensor);
  };
  converter.from_host = [function = share_with_any_thread(std::move(from_host))](
                            const at::Tensor& host, at::Device device) { return tensor_from(*function, host, device); };
  check(Plugins::of_process().add_checked(
      Plugins::Converter{at::DeviceTypeName(type, true), static_cast<DeviceType>(type),
                         std::make_shared<const DeviceConverter>(std::move(converter))},
      origin));
}

void register_reduction(std::string name, py::function function) {
  ReduceOp op(Reduction::custom);
  op.combine = [function = share_with_any_thread(std::move(function))](void* into, const void* from, std::size_t count,
                                                                       DType dtype) {
    if (closing()) return;
    const GilHeld gil;
    try {
      reduce_by(*function, into, from, count, dtype);
    } catch (py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  };
  check(Plugins::of_process().add_checked(Plugins::NamedReduction{std::move(name), std::move(op)}, origin));
}

}  // namespace

void bind_plugins(py::module_& module) {
  module.def(
      "load_plugin",
      [](const std::string& path) {
        return value_or_raise(unlocked([&] { return Plugins::of_process().load(path); }));
      },
      py::arg("path"));
  module.def("register_converter", &register_converter, py::arg("device_type"), py::arg("to_host"),
             py::arg("from_host"));
  module.def("register_reduction", &register_reduction, py::arg("name"), py::arg("function"));
  module.attr("_plugins") = py::capsule(&Plugins::of_process(), list_name);
}

}  // namespace tensorferry::python
