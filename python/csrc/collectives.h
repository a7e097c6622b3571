/// Groups of agents, for tensorferry.collectives and the backend of torch.distributed.
#pragma once

#include <optional>

#include "python/csrc/interpreter.h"
#include "rpc/collectives/raw_group.h"

namespace tensorferry::python {

/// Returns the options of an operation with a time-out in seconds; nullopt: the group's. Raises ValueError if it is
/// negative.
collectives::StartOptions options_of(std::optional<double> timeout);

/// Reduces `count` elements of `other` into `accumulator` by a Python function of two tensors. Needs the GIL. Throws
/// what the function raises.
void reduce_by(const py::function& function, void* accumulator, const void* other, std::size_t count, DType dtype);

void bind_collectives(py::module_& module);

}  // namespace tensorferry::python
