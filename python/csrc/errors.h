/// Converts a Status to a Python exception (a class of tensorferry.errors). All functions need the GIL.
#pragma once

#include <exception>
#include <string>

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

/// Sets the Python error for the exception that is being handled: of torch, of pybind11, or another of C++.
void set_error_of_exception();
/// Runs `body`. If it throws, sets the Python error and returns false or null.
template <class Body>
auto guarded(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception&) {
    set_error_of_exception();
    return {};
  }
}

/// Returns an attribute that is a str, for example `__qualname__`; "" if there is none.
std::string text_attribute(py::handle object, const char* name);
/// Returns a str as UTF-8. A lone surrogate, which has no UTF-8, becomes an escape such as \\udcff. Throws MemoryError.
std::string utf8_of(py::handle text);

/// Returns a class or function of a Python module. Imports the module at the first call for each name, then uses a
/// cache.
py::object attribute_of(const char* module, const char* name);

}  // namespace tensorferry::python
