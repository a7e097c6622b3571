/// The Python interpreter for C++ threads: releasing and taking the GIL, thread states of pool threads, and the
/// interpreter's end.
///
/// At its end, CPython 3.10 to 3.13 unwinds threads that ask for the GIL (pthread_exit), through C++ frames that may
/// not be unwound. The functions here put such a late thread to sleep instead, and the process exits around it.
#pragma once

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "agent/agent.h"

namespace tensorferry::python {

namespace py = pybind11;

/// Whether threads of the library must no longer enter Python. Set at exit, before finalisation begins.
bool closing() noexcept;
void set_closing() noexcept;

/// Takes the GIL with `state`, as PyEval_RestoreThread does. Never returns once the interpreter has ended, or if
/// `state` is null.
void take_gil(PyThreadState* state);

/// Sleeps until the process exits.
[[noreturn]] void sleep_for_ever() noexcept;

/// Releases the GIL while it lives.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() { take_gil(state_); }
  /// Returns the argument for interrupted().
  [[nodiscard]] PyThreadState* state() const { return state_; }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

/// Holds the GIL while it lives, on any thread, with the thread state that torch and pybind11 use.
class GilHeld {
 public:
  GilHeld();
  ~GilHeld();
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  PyGILState_STATE state_;
};

/// Shares a value that holds Python objects. The last owner may drop it on any thread, with or without the GIL. At the
/// interpreter's end the value is leaked.
template <class T>
std::shared_ptr<T> share_with_any_thread(T value) {
  return std::shared_ptr<T>(new T(std::move(value)), [](T* held) {
    if (closing()) return;  // the interpreter's end takes it
    GilHeld gil;
    delete held;
  });
}

/// Runs pending signal handlers; true if one raised (the error is then set in this thread). It is a callback for
/// Call::wait. Takes and releases the GIL, which the caller has released, with the thread state `released`. Python runs
/// signal handlers on the main thread alone; on other threads the result is false.
bool interrupted(PyThreadState* released);

/// Returns whether this thread is the one on which Python runs signal handlers, and Python is not about to end.
bool handles_signals() noexcept;

/// Runs pending signal handlers on the thread that handles_signals(), with or without the GIL. Throws what one raises,
/// as error_already_set; a KeyboardInterrupt names a wait for other ranks.
void run_signal_handlers();

/// If the error that is set now is a KeyboardInterrupt without a text, gives it a text that names `waited_for`.
void describe_interruption(std::string_view waited_for);

/// A gate that any thread opens, once. Waiting threads release the GIL.
class Gate {
 public:
  void open();
  [[nodiscard]] bool is_open() const;
  /// Waits until the gate is open; the caller holds the GIL, and wait() releases it meanwhile. False: `until` passed.
  /// Raises the exception of a signal handler; a KeyboardInterrupt names `what`, the thing waited for.
  bool wait(std::optional<Clock::time_point> until, std::string_view what);

 private:
  mutable std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

/// Makes the executor that enters Python. It gives each pool thread a thread state of its own, once, because entering
/// with it costs a fifth of PyGILState_Ensure.
std::shared_ptr<Executor> make_executor();

/// Calls a Python object like PyObject_Call. Raises the Python error as error_already_set. If CPython unwinds the
/// thread at the interpreter's end, the thread sleeps here instead.
py::object call_object(py::handle callable, py::handle args, py::handle kwargs);

}  // namespace tensorferry::python
