#include "python/csrc/errors.h"

#include <map>
#include <string>
#include <utility>

namespace tensorferry::python {

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
