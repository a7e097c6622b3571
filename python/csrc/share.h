/// tensorferry.share: tensors marked to be handed over without a copy.
#pragma once

#include <Python.h>

namespace pybind11 {
class module_;
}

namespace tensorferry::python {

/// Whether `object` is what tensorferry.share() returned.
bool is_shared(PyObject* object) noexcept;
/// The torch.Tensor that it marks: a borrowed reference.
PyObject* tensor_of_shared(PyObject* shared) noexcept;

void bind_share(pybind11::module_& module);

}  // namespace tensorferry::python
