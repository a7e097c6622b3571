/// Errors at the edge: a Status as a Python exception, and Python exceptions across the wire.
#pragma once

#include "channels/status.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Sets the Python error that `status` stands for (a class of tensorferry.errors).
void set_error(const Status& status);
/// The same, as the C++ exception that pybind11 hands to Python.
[[noreturn]] void raise(const Status& status);

template <class T>
T value_or_raise(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return *std::move(result);
}
inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}

/// A class or function of one of our Python modules, looked up once.
py::object attribute_of(const char* module, const char* name);

}  // namespace tensorferry::python
