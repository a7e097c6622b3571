/// rpc.publish: values that are encoded once, for many.
#pragma once

#include <Python.h>

#include <memory>

#include "rpc/core/published.h"

namespace pybind11 {
class module_;
}

namespace tensorferry::python {

/// Whether `object` is what publish() returned.
bool is_published(PyObject* object) noexcept;
const Published& published_in(PyObject* object) noexcept;

void bind_publish(pybind11::module_& module);

}  // namespace tensorferry::python
