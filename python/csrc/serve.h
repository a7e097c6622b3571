/// Calls that peers make: from what arrived to a Python function, and from its result or exception to the reply.
#pragma once

#include "python/csrc/agent.h"

namespace tensorferry::python {

/// Makes `agent` answer for Python functions, found by import when they are first called, and for what references ask:
/// tf:fetch (a copy of the object), tf:method (a call of one of its methods), and tf:next (the next item of an
/// iterator). tf:here says that the agent is there. Coroutines run on the agent's event loop. Where it trusts nobody
/// further than what it exposed, functions that were not are refused, and nothing is imported.
void serve_python(const std::shared_ptr<PythonAgent>& agent);
/// Makes `callable` callable by `name`.
void serve_exposed(const std::shared_ptr<PythonAgent>& agent, const std::string& name, const py::object& callable);

/// Where the result of one call goes: to the caller, or into the remote object that the call creates. Answers once.
/// Needs the GIL, but to be dropped.
class Answer {
 public:
  Answer(std::shared_ptr<PythonAgent> agent, const PeerInfo& caller, Reply reply)
      : agent_(std::move(agent)), caller_{caller.name, caller.incarnation}, reply_(std::move(reply)) {}
  Answer(Answer&&) noexcept = default;
  Answer& operator=(Answer&&) noexcept = default;

  /// What the request's head says. False: it asks for an object that must not be made; it is answered.
  bool begin(std::uint64_t call, const std::optional<Creation>& creation);
  void value(py::handle result);
  void error(py::error_already_set& error);
  /// When `future` (a torch future) completes, with what it holds.
  void future(py::object future);
  /// With what an object of ours has come to.
  void outcome(const Result<Outcome>& outcome);
  void fail(const Status& status);
  /// With PermissionDenied.
  void refuse(const Status& why);

  [[nodiscard]] PythonAgent& agent() const { return *agent_; }
  [[nodiscard]] const AgentId& caller() const { return caller_; }
  [[nodiscard]] Reply& reply() { return reply_; }
  /// The caller's number for it, once begun.
  [[nodiscard]] std::uint64_t call() const { return call_; }

 private:
  void send(Message message, Passage passage);

  std::shared_ptr<PythonAgent> agent_;
  AgentId caller_;
  Reply reply_;
  std::uint64_t call_ = 0;
  std::optional<Creation> creation_;
};

}  // namespace tensorferry::python
