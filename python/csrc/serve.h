/// Serves the calls of peers: decodes the request, calls the Python function, and encodes its result or exception as
/// the reply.
#pragma once

#include "python/csrc/agent.h"
#include "rpc/core/exception.h"
#include "rpc/member/incoming_call.h"

namespace tensorferry::python {

/// Makes `agent` serve Python functions, which import finds at their first call, and the calls that references make:
/// - tf:fetch returns a copy of the object;
/// - tf:method calls a method of the object;
/// - tf:next returns the next item of an iterator.
///
/// tf:here answers at once, and shows that the agent is there. Coroutines run on the agent's event loop. With
/// trust="registered", the agent refuses functions that were not exposed, and imports nothing.
void serve_python(const std::shared_ptr<PythonAgent>& agent);
/// Makes `agent` serve `callable` under `name`.
void serve_exposed(const std::shared_ptr<PythonAgent>& agent, const std::string& name, const py::object& callable);

/// The reply of one call in Python's terms: sends the result to the caller, or puts it into the remote object that the
/// call creates. Answers once. All functions need the GIL, except the destructor.
class PythonReply {
 public:
  PythonReply(std::shared_ptr<PythonAgent> agent, const PeerInfo& caller, Reply reply)
      : agent_(std::move(agent)), call_(agent_->member(), caller, std::move(reply)) {}
  PythonReply(PythonReply&&) noexcept = default;
  PythonReply& operator=(PythonReply&&) noexcept = default;

  /// Answers with `result`, or with the error of encoding it. If the call creates an object, the object keeps `result`,
  /// and the reply is None.
  void value(py::handle result);
  /// Answers with the Python exception that the function raised, and logs it. If the call creates an object, the object
  /// keeps the exception, and the reply is None.
  void error(py::error_already_set& error);
  /// Answers with the value or exception of `future` (a torch future) when it completes. TypeError: not a future.
  void future(py::object future);
  /// Answers with the value or exception of one of the agent's objects.
  void outcome(const Result<Outcome>& outcome);
  /// Fails the call with `status`.
  void fail(const Status& status) { call_.fail(status); }
  /// Answers with PermissionDenied. An object that the call was to create gets that error too.
  void refuse(const Status& why);

  [[nodiscard]] PythonAgent& agent() const { return *agent_; }
  [[nodiscard]] IncomingCall& call() { return call_; }
  [[nodiscard]] Reply& reply() { return call_.reply(); }

 private:
  void answer_with(py::error_already_set& raised, RemoteException described);

  std::shared_ptr<PythonAgent> agent_;
  IncomingCall call_;
};

}  // namespace tensorferry::python
