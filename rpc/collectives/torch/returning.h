/// Runs a hook when a function of the backend that may block returns to its caller.
#pragma once

namespace tensorferry::collectives {

/// Sets a function that runs when a call of the backend that may block returns to its caller, also by an exception.
/// Python's module sets it: at the interpreter's end a thread may not return to torch's binding, which would take the
/// GIL.
void call_before_return(void (*hook)());

/// Stands at the begin of a function that blocks; calls the hook of call_before_return() at its end.
struct Returning {
  Returning() = default;
  Returning(const Returning&) = delete;
  Returning& operator=(const Returning&) = delete;
  ~Returning();
};

}  // namespace tensorferry::collectives
