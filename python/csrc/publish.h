/// rpc.publish(): values that are encoded once and sent to many peers. Needs the GIL.
#pragma once

#include <Python.h>

#include <memory>

#include "rpc/core/published.h"

namespace pybind11 {
class module_;
}

namespace tensorferry::python {

/// Whether `object` is a handle that publish() returned.
bool is_published(PyObject* object) noexcept;
/// Returns the value of a handle, which keeps it alive.
const Published& published_in(PyObject* object) noexcept;

void bind_publish(pybind11::module_& module);

}  // namespace tensorferry::python
