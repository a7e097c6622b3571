#include "python/csrc/served.h"

#include <pybind11/stl.h>

#include <atomic>
#include <string>
#include <utility>

namespace tensorferry::python {
namespace {

/// The ContextVar with the current ServedCall. current() reads it only after the first ServedCall was made, so that
/// other programs pay nothing.
PyObject* variable = nullptr;
bool in_use = false;

}  // namespace

ServedCall::ServedCall(PythonReply answer)
    : agent_(answer.agent().shared_from_this()), answer_(std::in_place, std::move(answer)) {
  in_use = true;
}

ServedCall* ServedCall::current() {
  if (!in_use) return nullptr;
  PyObject* found = nullptr;
  if (PyContextVar_Get(variable, nullptr, &found) != 0) throw py::error_already_set();
  if (found == nullptr) return nullptr;
  const auto call = py::reinterpret_steal<py::object>(found);
  return call.cast<ServedCall*>();  // the context keeps it alive
}

void ServedCall::value(py::handle result) {
  if (auto answer = std::exchange(answer_, std::nullopt)) answer->value(result);
}

void ServedCall::error(const py::object& exception) {
  auto answer = std::exchange(answer_, std::nullopt);
  if (!answer) return;
  PyErr_Restore(py::type::of(exception).inc_ref().ptr(), exception.inc_ref().ptr(),
                PyException_GetTraceback(exception.ptr()));
  py::error_already_set raised;
  answer->error(raised);
}

void ServedCall::give_up() {
  auto answer = std::exchange(answer_, std::nullopt);
  if (!answer) return;
  const auto deadline = answer->reply().deadline();
  const bool expired = deadline && *deadline <= Clock().now();
  answer->fail(Status(expired ? Code::deadline_exceeded : Code::cancelled,
                      std::string(expired ? "its deadline passed while it ran" : "it was cancelled") + " on \"" +
                          agent_->self().name + "\""));
}

std::optional<double> ServedCall::time_left() {
  const auto deadline = answer_ ? answer_->reply().deadline() : std::nullopt;
  if (!deadline) return std::nullopt;
  return std::chrono::duration<double>(*deadline - Clock().now()).count();
}

void ServedCall::when_cancelled(const std::shared_ptr<LoopInbox>& inbox, py::object callable) {
  if (!answer_) return;
  answer_->reply().on_cancelled(
      [inbox, callable = share_with_any_thread(std::move(callable))]() mutable { inbox->post(std::move(callable)); });
}

void serve_coroutine(const py::object& coroutine, PythonReply& answer) {
  const auto loop = answer.agent().handler_loop();
  const auto call = std::make_shared<ServedCall>(std::move(answer));
  try {
    loop.attr("run")(call, coroutine);
  } catch (py::error_already_set& raised) {
    call->error(raised.value());
  }
}

void bind_served(py::module_& module) {
  variable = PyContextVar_New("tensorferry.rpc.serving", nullptr);
  if (variable == nullptr) throw py::error_already_set();
  module.attr("_serving") = py::reinterpret_borrow<py::object>(variable);
  using Flag = std::atomic<bool>;
  py::class_<Flag, std::shared_ptr<Flag>>(
      module, "_GivenUp", "Whether the caller has given up the call that this thread serves. Any thread may read it.")
      .def(py::init([] {
        auto* const call = ServingScope::call();
        return call != nullptr ? call->given_up() : std::make_shared<Flag>(false);
      }))
      .def("__bool__", [](const Flag& flag) { return flag.load(); });
  py::class_<ServedCall, std::shared_ptr<ServedCall>>(module, "_ServedCall", "A call that a coroutine serves.")
      .def(py::init([](std::shared_ptr<PythonAgent> agent) {
        in_use = true;
        return std::make_shared<ServedCall>(std::move(agent));
      }))
      .def("value", &ServedCall::value)
      .def("error", &ServedCall::error)
      .def("give_up", &ServedCall::give_up)
      .def("time_left", &ServedCall::time_left)
      .def("when_cancelled", &ServedCall::when_cancelled);
}

}  // namespace tensorferry::python
