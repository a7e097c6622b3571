#include "python/csrc/deadline.h"

#include <algorithm>

#include "python/csrc/agent.h"
#include "python/csrc/errors.h"

namespace tensorferry::python {
namespace {

/// The ContextVar of rpc.deadline(): the deadline in seconds of time.monotonic(), which is the clock of Clock too. It
/// is a context variable so that asyncio tasks inherit it. Reading it costs some nanoseconds if it is not set.
PyObject* variable = nullptr;

}  // namespace

std::optional<Clock::time_point> ambient_deadline() {
  std::optional<Clock::time_point> until;
  if (const auto* call = ServingScope::call()) until = call->inherited_deadline();
  PyObject* found = nullptr;
  if (PyContextVar_Get(variable, nullptr, &found) != 0) throw py::error_already_set();
  if (found == nullptr) return until;
  const auto seconds = py::reinterpret_steal<py::object>(found).cast<double>();
  const Clock::time_point set(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
  return until ? std::min(*until, set) : set;
}

TimeOut within_ambient_deadline(TimeOut own) {
  const auto until = ambient_deadline();
  if (!until) return own;
  const auto left = std::chrono::ceil<Milliseconds>(*until - Clock().now());
  if (left.count() <= 0) {
    raise(Status(Code::deadline_exceeded,
                 "the call was not made: the deadline around it (rpc.deadline(), or that of the call being served "
                 "here) has passed"));
  }
  return own.length.count() == 0 || left <= own.length ? TimeOut{left, true} : own;
}

void bind_deadline(py::module_& module) {
  variable = PyContextVar_New("tensorferry.rpc.deadline", nullptr);
  if (variable == nullptr) throw py::error_already_set();
  module.attr("_deadline") = py::reinterpret_borrow<py::object>(variable);
  module.def(
      "cancelled",
      [] {
        const auto* call = ServingScope::call();
        return call != nullptr && call->reply().cancelled();
      },
      R"(Returns whether the caller has given up the call that this thread, or asyncio task, serves.

That is so if the caller has cancelled the call, the call's deadline has passed, or the caller is gone. Its result would
be discarded, so a long function may stop. Takes less than a microsecond.

Returns:
    False outside of functions that a peer called, and on threads and in callbacks that such a function starts.

Example::

    def search(space):
        for candidate in space:
            if rpc.cancelled():
                return None
            if candidate > 3:
                return candidate

    assert rpc.rpc_sync("worker1", search, args=([1, 3, 5],)) == 5
)");
}

}  // namespace tensorferry::python
