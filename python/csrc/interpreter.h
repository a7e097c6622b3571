/// What C++ must know of the Python interpreter: letting the GIL go and taking it back, thread states of pool threads,
/// and the interpreter's end.
///
/// At its end CPython 3.10 to 3.13 unwinds threads that ask for the GIL (pthread_exit), through C++ frames that may not
/// be unwound; whoever comes too late is put to sleep here instead, and the process exits around it.
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

/// Whether Python may be entered no more from threads of ours. Set at exit, before finalisation begins.
bool closing() noexcept;
void set_closing() noexcept;

/// PyEval_RestoreThread, which never returns once the interpreter is at its end.
void take_gil(PyThreadState* state);

/// Sleeps until the process has gone.
[[noreturn]] void sleep_for_ever() noexcept;

/// The GIL is let go while one of these lives.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() { take_gil(state_); }
  /// What interrupted() wants.
  [[nodiscard]] PyThreadState* state() const { return state_; }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

/// The GIL is held while one of these lives, on any thread, with the thread state that torch and pybind11 use.
class GilHeld {
 public:
  GilHeld();
  ~GilHeld();
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  PyGILState_STATE state_;
};

/// Shares what holds Python objects with owners that let go on any thread, with or without the GIL.
template <class T>
std::shared_ptr<T> share_with_any_thread(T value) {
  return std::shared_ptr<T>(new T(std::move(value)), [](T* held) {
    if (closing()) return;  // the interpreter's end takes it
    GilHeld gil;
    delete held;
  });
}

/// For Call::wait: whether a signal's Python handler raised (the error is then set in this thread). Takes the GIL,
/// which the caller has let go, only on the main thread: elsewhere no Python handler runs.
bool interrupted(PyThreadState* released);

/// Where the error that is set now is a KeyboardInterrupt without a text, gives it one: what was waited for.
void describe_interruption(std::string_view waited_for);

/// Opened once, by any thread; waited for without the GIL.
class Gate {
 public:
  void open();
  [[nodiscard]] bool is_open() const;
  /// Called with the GIL, lets it go. False: `until` passed. Raises what a signal's handler raised: an interruption of
  /// the wait for `what`.
  bool wait(std::optional<Clock::time_point> until, std::string_view what);

 private:
  mutable std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

/// Gives each pool thread a thread state of its own, once: entering with it costs a fifth of PyGILState_Ensure.
std::shared_ptr<Executor> make_executor();

/// Calls a Python object like PyObject_Call. Unwinding at the interpreter's end stops here.
py::object call_object(py::handle callable, py::handle args, py::handle kwargs);

}  // namespace tensorferry::python
