/// A call that a coroutine serves. Many of them share the thread of one event loop, so what a pool thread knows by
/// being inside a handler (its agent, whether the caller has given up, how long there is) each task knows by a variable
/// of its context, which the tasks and threads that it starts inherit.
#pragma once

#include <memory>
#include <optional>

#include "python/csrc/inbox.h"
#include "python/csrc/serve.h"

namespace tensorferry::python {

/// Answers once; what comes later is dropped. All functions need the GIL.
class ServedCall final {
 public:
  explicit ServedCall(Answer answer);
  /// Work for `agent` that answers nobody.
  explicit ServedCall(std::shared_ptr<PythonAgent> agent) : agent_(std::move(agent)) {}

  /// That of the current context; null: it serves none.
  static ServedCall* current();

  [[nodiscard]] PythonAgent& agent() const { return *agent_; }
  /// Null once it has been answered.
  [[nodiscard]] Reply* reply() { return answer_ ? &answer_->reply() : nullptr; }

  void value(py::handle result);
  void error(const py::object& exception);
  /// Its task was cancelled.
  void give_up();
  /// Seconds until its deadline.
  [[nodiscard]] std::optional<double> time_left();
  /// Posts `callable` when the caller gives the call up; at once where it has.
  void when_cancelled(const std::shared_ptr<LoopInbox>& inbox, py::object callable);

 private:
  std::shared_ptr<PythonAgent> agent_;
  std::optional<Answer> answer_;
};

/// Runs `coroutine` on the agent's event loop; what it comes to is the answer.
void serve_coroutine(const py::object& coroutine, Answer& answer);

void bind_served(py::module_& module);

}  // namespace tensorferry::python
