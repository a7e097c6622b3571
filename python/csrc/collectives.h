/// Groups of agents, for tensorferry.collectives and the backend of torch.distributed.
#pragma once

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

void bind_collectives(py::module_& module);

}  // namespace tensorferry::python
