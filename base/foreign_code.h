/// Runs code of others on threads of ours: callbacks of torch and of the program, and what those call.
///
/// A thread of ours has no caller that could handle an exception: it would end the process. So each place that enters
/// such code does it by run_foreign().
#pragma once

#include <cxxabi.h>

#include <string_view>
#include <utility>

namespace tensorferry {

#ifdef __GLIBCXX__
/// The type by which a handler catches the unwinding of a thread that ends (pthread_exit, pthread_cancel).
using ForcedUnwind = abi::__forced_unwind;
#else
/// libc++ gives that unwinding no type: catch (...) catches it, and log_thrown() recognizes it.
struct ForcedUnwind {};
#endif

/// Logs the exception that is being handled, as one warning: "`what` threw: " and the first line of its text.
void log_thrown(std::string_view what) noexcept;

/// Sleeps until the process exits. For a thread that CPython unwinds (pthread_exit) at the interpreter's end: the
/// unwinding may not be stopped, and not pass through a function that is noexcept.
[[noreturn]] void sleep_until_exit() noexcept;

/// Runs `body`. Logs what it throws. `what` names the code, with its article: "a callback of a future".
template <class Body>
void run_foreign(std::string_view what, Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
  } catch (const ForcedUnwind&) {
    sleep_until_exit();
  } catch (...) {
    log_thrown(what);
  }
}

}  // namespace tensorferry
