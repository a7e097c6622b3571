/// tensorferry.register(): registers tensors with network cards ahead of their first use. Needs the GIL.
#pragma once

namespace pybind11 {
class module_;
}

namespace tensorferry::python {

void bind_registered(pybind11::module_& module);

}  // namespace tensorferry::python
