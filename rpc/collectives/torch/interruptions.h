/// Lets the program's signal handlers run while a thread blocks in an entry point of torch's or in the forming of a
/// group, so that Ctrl-C ends the wait.
///
/// A runtime such as Python runs the handlers on one of its threads alone, when that thread asks for them. Other
/// threads wait as if there were no signals.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <utility>

#include "base/run_detached.h"

namespace tensorferry::collectives {

/// How the program's runtime takes signals. Both functions may be called with or without the runtime's lock.
struct SignalHandling {
  bool (*handled_here)() noexcept = nullptr;  // whether this thread runs the handlers
  void (*run_handlers)() = nullptr;           // runs those that are due; throws what one raises
};

/// Sets the runtime of this process. It is one for the process, because torch's calls of a backend bring no context.
void handle_signals_by(const SignalHandling& handling) noexcept;

/// One wait of this thread that a signal may end.
class WaitInterruption final {
 public:
  /// Returns the callback of waits that take slices: it runs the handlers, and returns whether one has thrown. Empty if
  /// this thread runs none. `this` must outlive it.
  [[nodiscard]] std::function<bool()> check();
  /// Throws what the handler has thrown, if one has.
  void rethrow() const {
    if (raised_) std::rethrow_exception(raised_);
  }

 private:
  std::exception_ptr raised_;
};

/// Runs `run`, which blocks and takes no callback, and returns its result. If this thread runs signal handlers, another
/// one executes `run`, and an exception of a handler ends the wait: `run` then goes on by itself, and its result is
/// dropped. So it must own all that it uses.
template <class Run>
auto run_interruptibly(Run run) -> decltype(run()) {
  WaitInterruption interruption;
  const auto interrupted = interruption.check();
  if (!interrupted) return run();
  auto result = run_detached(std::move(run));
  while (result.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready && !interrupted()) {
  }
  interruption.rethrow();
  return result.get();
}

}  // namespace tensorferry::collectives
