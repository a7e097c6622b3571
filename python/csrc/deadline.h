/// The ambient deadline of calls: the earlier of the deadline of rpc.deadline() and that of the call that this thread
/// serves, if its caller set one. Calls made inside inherit it, beside their own time-outs. A default time-out bounds
/// one call alone, and is not inherited.
#pragma once

#include <optional>

#include "agent/agent.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// How long a call may take, and whether its caller decided that.
struct TimeOut {
  Milliseconds length{};  // 0: no limit
  bool set = false;       // the caller set it, by timeout= or a deadline; else it is the agent's default
};

/// Returns the ambient deadline; nullopt if there is none. Needs the GIL.
std::optional<Clock::time_point> ambient_deadline();

/// Returns the smaller of a call's own time-out and the time left until the ambient deadline, at least 1 ms. Raises
/// DeadlineExceeded if no time is left. Needs the GIL.
TimeOut within_ambient_deadline(TimeOut own);

void bind_deadline(py::module_& module);

}  // namespace tensorferry::python
