#include "python/csrc/exceptions.h"

#include <utility>

#include "python/csrc/errors.h"

namespace tensorferry::python {
namespace {

std::string text_of_object(py::handle object) {
  try {
    return utf8_of(py::str(object));
  } catch (py::error_already_set&) {
    return "<no text: __str__ raised>";
  }
}

bool is_exception_type(py::handle type) {
  return PyType_Check(type.ptr()) != 0 && PyObject_IsSubclass(type.ptr(), PyExc_Exception) == 1;
}

/// Returns the described type; null if its module is not loaded here. With `only`, returns builtin types, types of
/// tensorferry.errors and exposed classes alone, else null.
py::object type_of(const RemoteException& described, const Exposed* only) {
  if (only != nullptr && described.module != "builtins" && described.module != "tensorferry.errors") {
    return only->class_named(described.module, described.qualname);
  }
  // Does not import the module: if it is not loaded, no code here can catch the type.
  auto* module = PyDict_GetItemString(PyImport_GetModuleDict(), described.module.c_str());
  if (module == nullptr) return {};
  auto found = py::reinterpret_borrow<py::object>(module);
  for (std::size_t at = 0; at <= described.qualname.size();) {
    const auto dot = std::min(described.qualname.find('.', at), described.qualname.size());
    found = found.attr(described.qualname.substr(at, dot - at).c_str());
    at = dot + 1;
  }
  return found;
}

/// Makes an exception of the described type with the same text; null if the type is not here or does not take one text.
py::object made_from_text(const RemoteException& described, const Exposed* only) {
  try {
    const auto found = type_of(described, only);
    if (!found || !is_exception_type(found)) return {};
    auto made = found(described.text);
    return PyExceptionInstance_Check(made.ptr()) != 0 ? made : py::object();
  } catch (py::error_already_set&) {
    return {};
  }
}

py::object remote_error(const RemoteException& described) {
  const auto type_name = described.module.empty() ? described.qualname : described.module + "." + described.qualname;
  const auto message = described.text.empty() ? type_name : type_name + ": " + described.text;
  return attribute_of("tensorferry.errors", "RemoteError")(message, type_name, described.peer);
}

}  // namespace

RemoteException describe_exception(const py::error_already_set& error, const std::string& self) {
  RemoteException described;
  described.module = text_attribute(error.type(), "__module__");
  described.qualname = text_attribute(error.type(), "__qualname__");
  described.text = text_of_object(error.value());
  described.peer = self;
  try {
    const auto lines = attribute_of("traceback", "format_exception")(
        error.type(), error.value(), error.trace() ? error.trace() : py::object(py::none()));
    described.traceback = utf8_of(py::str("").attr("join")(lines));
  } catch (py::error_already_set&) {
    described.traceback = described.qualname + ": " + described.text;
  }
  return described;
}

void raise_remote(const RemoteException& described, py::object exception, const Exposed* only) {
  // A SystemExit or KeyboardInterrupt at the peer must not end this process.
  if (exception && !is_exception_type(py::type::of(exception))) exception = {};
  if (!exception) exception = made_from_text(described, only);
  if (!exception) exception = remote_error(described);
  const auto traceback = attribute_of("tensorferry.errors", "RemoteTraceback")(described.peer, described.traceback);
  PyException_SetCause(exception.ptr(), py::object(traceback).release().ptr());
  PyErr_SetObject(py::type::of(exception).ptr(), exception.ptr());
  throw py::error_already_set();
}

}  // namespace tensorferry::python
