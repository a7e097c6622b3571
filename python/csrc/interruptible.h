/// Runs operations that block so that Ctrl-C ends the wait for them.
#pragma once

#include <chrono>
#include <future>
#include <string_view>
#include <utility>

#include "base/run_detached.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Runs a blocking operation without the GIL.
template <class Operation>
auto unlocked(Operation operation) {
  GilReleased gil;
  return operation();
}

/// Runs a blocking operation, which owns all that it uses, without the GIL. If this thread handles signals, another one
/// runs the operation, and Ctrl-C ends the wait: the operation then goes on by itself, and its result is dropped, on
/// that thread and without the GIL. The caller gets what the operation throws.
template <class Operation>
auto interruptible(std::string_view waited_for, Operation operation) {
  if (!handles_signals()) return unlocked(std::move(operation));
  auto result = run_detached(std::move(operation));
  while (unlocked([&] { return result.wait_for(std::chrono::milliseconds(50)); }) != std::future_status::ready) {
    if (PyErr_CheckSignals() == 0) continue;
    describe_interruption(waited_for);
    unlocked([dropped = std::move(result)]() mutable {
      dropped = {};
      return true;
    });
    throw py::error_already_set();
  }
  return result.get();
}

}  // namespace tensorferry::python
