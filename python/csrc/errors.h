/// Converts a Status to a Python exception (a class of tensorferry.errors). All functions need the GIL.
#pragma once

#include "base/status.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Sets the Python error for `status`, which is not ok. If the package tensorferry.errors cannot be imported, sets that
/// error instead.
void set_error(const Status& status);
/// Raises the same error, as the C++ exception that pybind11 hands to Python.
[[noreturn]] void raise(const Status& status);

template <class T>
T value_or_raise(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return *std::move(result);
}
inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}

/// Returns a class or function of a Python module. Imports the module at the first call for each name, then uses a
/// cache.
py::object attribute_of(const char* module, const char* name);

}  // namespace tensorferry::python
