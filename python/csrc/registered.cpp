#include "python/csrc/registered.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "python/csrc/errors.h"
#include "rpc/registering.h"

namespace tensorferry::python {
namespace {

RegisteredMemory register_tensor(py::handle tensor) {
  if (!THPVariable_Check(tensor.ptr()))
    throw py::type_error("register() takes a torch.Tensor, not " + std::string(Py_TYPE(tensor.ptr())->tp_name));
  const auto& unpacked = THPVariable_Unpack(tensor.ptr());
  auto made = register_ahead(unpacked);
  if (!made.ok()) throw py::value_error(std::string(made.status().what()));
  return *std::move(made);
}

}  // namespace

void bind_registered(py::module_& module) {
  py::class_<RegisteredMemory>(module, "RegisteredMemory", "Memory that stays registered while this object holds it.")
      .def_readonly("bytes", &RegisteredMemory::bytes, "The size of the memory; 0 after release().")
      .def("release", [](RegisteredMemory& memory) { memory = {}; });
  py::options options;
  options.disable_function_signatures();  // the docstring begins with its own, whose types are more exact
  module.def("register_memory", &register_tensor, py::arg("tensor"),
             R"(register_memory(tensor: torch.Tensor) -> RegisteredMemory

Implements tensorferry.register().)");
}

}  // namespace tensorferry::python
