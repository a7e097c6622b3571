/// tensorferry.share(): marks tensors to be handed over without a copy. Needs the GIL.
#pragma once

#include <Python.h>

namespace pybind11 {
class module_;
}

namespace tensorferry::python {

/// Whether `object` is a marker that tensorferry.share() returned.
bool is_shared(PyObject* object) noexcept;
/// Returns the marked torch.Tensor, as a borrowed reference.
PyObject* tensor_of_shared(PyObject* shared) noexcept;

void bind_share(pybind11::module_& module);

}  // namespace tensorferry::python
