#include "python/csrc/interpreter.h"

#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <utility>

namespace tensorferry::python {
namespace {

std::atomic<bool> is_closing{false};

class PythonExecutor final : public Executor {
 public:
  explicit PythonExecutor(PyInterpreterState* interpreter) : interpreter_(interpreter) {}

  // Runs on the new thread itself. CPython then uses this state for the thread in PyGILState_Ensure too, which torch
  // and pybind11 call.
  void* attach() override { return closing() ? nullptr : PyThreadState_New(interpreter_); }
  void enter(void* thread) override { take_gil(static_cast<PyThreadState*>(thread)); }
  void leave(void* /*thread*/) override { PyEval_SaveThread(); }
  void detach(void* thread) override {
    if (closing() || thread == nullptr) return;
    take_gil(static_cast<PyThreadState*>(thread));
    PyThreadState_Clear(static_cast<PyThreadState*>(thread));
    PyThreadState_DeleteCurrent();
  }

 private:
  PyInterpreterState* interpreter_;
};

}  // namespace

bool closing() noexcept { return is_closing.load(std::memory_order_acquire); }
void set_closing() noexcept { is_closing.store(true, std::memory_order_release); }

void sleep_for_ever() noexcept {
  for (;;) ::pause();
}

void take_gil(PyThreadState* state) {
  if (state == nullptr) sleep_for_ever();
  // Does not test closing(): the main thread goes on through finalisation, and CPython itself stops the other threads.
  try {
    PyEval_RestoreThread(state);
  } catch (const abi::__forced_unwind&) {
    sleep_for_ever();
  }
}

GilHeld::GilHeld() {
  try {
    state_ = PyGILState_Ensure();
  } catch (const abi::__forced_unwind&) {
    sleep_for_ever();
  }
}

GilHeld::~GilHeld() { PyGILState_Release(state_); }

// Python runs signal handlers on the main thread alone, so the others need not take the GIL.
bool handles_signals() noexcept { return ::gettid() == ::getpid() && !closing(); }

void run_signal_handlers() {
  const GilHeld gil;
  if (PyErr_CheckSignals() == 0) return;
  describe_interruption("the other ranks of a group");
  throw py::error_already_set();
}

bool interrupted(PyThreadState* released) {
  if (::gettid() != ::getpid()) return false;
  take_gil(released);
  const bool raised = PyErr_CheckSignals() != 0;
  PyEval_SaveThread();
  return raised;
}

void describe_interruption(std::string_view waited_for) {
  if (PyErr_Occurred() == nullptr || PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) == 0) return;
  py::error_already_set raised;
  const py::object error = raised.value();
  const py::tuple text = py::make_tuple(std::string("interrupted while waiting for ").append(waited_for));
  if (py::len(error.attr("args")) == 0) error.attr("args") = text;
  raised.restore();
}

void Gate::open() {
  const std::lock_guard lock(mutex_);
  open_ = true;
  opened_.notify_all();
}

bool Gate::is_open() const {
  const std::lock_guard lock(mutex_);
  return open_;
}

bool Gate::wait(std::optional<Clock::time_point> until, std::string_view what) {
  if (is_open()) return true;
  bool raised = false;
  {
    GilReleased gil;
    const WaitInHandler place;
    while (!raised) {
      // Waits in slices, because a signal does not wake a condition variable.
      auto slice = Clock().now() + Milliseconds(50);
      if (until && *until < slice) slice = *until;
      {
        std::unique_lock lock(mutex_);
        if (opened_.wait_until(lock, slice, [&] { return open_; })) return true;
      }
      if (until && Clock().now() >= *until) return false;
      raised = interrupted(gil.state());
    }
  }
  describe_interruption(what);
  throw py::error_already_set();
}

std::shared_ptr<Executor> make_executor() { return std::make_shared<PythonExecutor>(PyInterpreterState_Get()); }

py::object call_object(py::handle callable, py::handle args, py::handle kwargs) {
  PyObject* result = nullptr;
  try {
    result = PyObject_Call(callable.ptr(), args.ptr(), kwargs.ptr());
  } catch (const abi::__forced_unwind&) {
    sleep_for_ever();
  }
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace tensorferry::python
