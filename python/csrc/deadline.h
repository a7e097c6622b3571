/// The ambient deadline of calls: the earlier of the deadline of the call that this thread serves and that of
/// rpc.deadline(). Calls made inside inherit it, beside their own time-outs.
#pragma once

#include <optional>

#include "agent/agent.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Returns the ambient deadline; nullopt if there is none. Needs the GIL.
std::optional<Clock::time_point> ambient_deadline();

/// Returns the smaller of a call's own time-out (0: none) and the time left until the ambient deadline, at least 1 ms.
/// Raises DeadlineExceeded if no time is left. Needs the GIL.
Milliseconds within_ambient_deadline(Milliseconds own);

void bind_deadline(py::module_& module);

}  // namespace tensorferry::python
