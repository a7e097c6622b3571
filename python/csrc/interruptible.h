/// Runs operations that block so that Ctrl-C ends the wait for them.
#pragma once

#include <chrono>
#include <exception>
#include <future>
#include <string_view>
#include <utility>

#include "base/threads.h"
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
  std::promise<decltype(operation())> promise;
  auto result = promise.get_future();
  start_thread([operation = std::move(operation), promise = std::move(promise)]() mutable {
    try {
      promise.set_value(operation());
    } catch (...) {
      promise.set_exception(std::current_exception());
    }
  }).detach();
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
