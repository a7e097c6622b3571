/// The backend of torch.distributed over groups, and its options.
#pragma once

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

void bind_process_group(py::module_& module);

}  // namespace tensorferry::python
