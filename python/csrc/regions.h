/// One-sided memory for Python: regions and published versions (rpc/regions).
#pragma once

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

void bind_regions(py::module_& module);

}  // namespace tensorferry::python
