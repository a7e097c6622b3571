/// Broadcasts in buckets, and hooks that reduce buckets of gradients, for tensorferry.ddp.
#pragma once

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

void bind_data_parallel(py::module_& module);

}  // namespace tensorferry::python
