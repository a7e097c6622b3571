/// What programs register for all agents of the process: plugins, converters, reductions. Needs the GIL.
#pragma once

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

void bind_plugins(py::module_& module);

}  // namespace tensorferry::python
