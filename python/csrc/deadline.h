/// How long a call may take beside its own time-out: the deadline of the call that this thread serves, and that of
/// rpc.deadline(). Both are the deadlines of the calls made inside.
#pragma once

#include <optional>

#include "agent/agent.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// The earlier of the two; nullopt: there is neither. Needs the GIL.
std::optional<Clock::time_point> ambient_deadline();

/// The lesser of a call's own time-out (0: none) and what is left of the ambient deadline, at least 1 ms. Raises
/// DeadlineExceeded where nothing is left. Needs the GIL.
Milliseconds within_ambient_deadline(Milliseconds own);

void bind_deadline(py::module_& module);

}  // namespace tensorferry::python
