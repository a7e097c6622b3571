/// A call that a coroutine serves. A pool thread has thread-local state for the call that it serves: its agent, its
/// deadline, and whether the caller has given up. Coroutines share the thread of one event loop, so each task has that
/// state in a context variable. The tasks and threads that it starts inherit the variable.
#pragma once

#include <memory>
#include <optional>

#include "python/csrc/inbox.h"
#include "python/csrc/serve.h"

namespace tensorferry::python {

/// The state of a call that a coroutine serves. Answers once; later answers are dropped. All functions need the GIL.
class ServedCall final {
 public:
  explicit ServedCall(PythonReply answer);
  /// Work for `agent` without a call to answer.
  explicit ServedCall(std::shared_ptr<PythonAgent> agent) : agent_(std::move(agent)) {}

  /// Returns the call of the current context; null if it serves none.
  static ServedCall* current();

  [[nodiscard]] PythonAgent& agent() const { return *agent_; }
  /// Returns the call; null once it has been answered.
  [[nodiscard]] IncomingCall* call() { return answer_ ? &answer_->call() : nullptr; }

  /// Answers with `result`.
  void value(py::handle result);
  /// Answers with `exception`.
  void error(const py::object& exception);
  /// Answers for a task that was cancelled: DeadlineExceeded if the deadline has passed, else Cancelled.
  void give_up();
  /// Returns the seconds until the deadline; nullopt if there is none, or the call has been answered.
  [[nodiscard]] std::optional<double> time_left();
  /// Posts `callable` to `inbox` when the caller gives up the call; at once if it has already. Does nothing if the call
  /// has been answered.
  void when_cancelled(const std::shared_ptr<LoopInbox>& inbox, py::object callable);

 private:
  std::shared_ptr<PythonAgent> agent_;
  std::optional<PythonReply> answer_;
};

/// Runs `coroutine` on the agent's event loop, and answers with its result or exception.
void serve_coroutine(const py::object& coroutine, PythonReply& answer);

void bind_served(py::module_& module);

}  // namespace tensorferry::python
