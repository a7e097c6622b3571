#include "python/csrc/errors.h"

#include <torch/csrc/Exceptions.h>

#include <map>
#include <new>
#include <string>
#include <utility>

namespace tensorferry::python {

void set_error_of_exception() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

std::string utf8_of(py::handle text) {
  const auto bytes =
      py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes) throw py::error_already_set();
  return std::string(bytes);
}

std::string text_attribute(py::handle object, const char* name) {
  const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttrString(object.ptr(), name));
  if (found && PyUnicode_Check(found.ptr())) return utf8_of(found);
  PyErr_Clear();
  return {};
}

py::object attribute_of(const char* module, const char* name) {
  static auto& found = *new std::map<std::pair<std::string, std::string>, py::object>;  // outlives the interpreter
  auto& object = found[{module, name}];
  if (!object) object = py::module_::import(module).attr(name);
  return object;
}

void set_error(const Status& status) {
  try {
    const auto type = attribute_of("tensorferry.errors", std::string(name_of(status.code())).c_str());
    const auto text = status.what();
    const py::str message(text.data(), text.size());
    PyErr_SetObject(type.ptr(), message.ptr());
  } catch (py::error_already_set& error) {
    error.restore();  // tensorferry.errors cannot be imported
  }
}

void raise(const Status& status) {
  set_error(status);
  throw py::error_already_set();
}

}  // namespace tensorferry::python
