/// A function that runs by itself on a thread of its own.
#pragma once

#include <exception>
#include <future>
#include <utility>

#include "base/threads.h"

namespace tensorferry {

/// Starts a thread (start_thread) that runs `run`, which owns all that it uses, and returns the future of its result or
/// of what it throws. If the future is dropped, `run` goes on, and its result is dropped with it.
template <class Run>
auto run_detached(Run run) -> std::future<decltype(run())> {
  std::promise<decltype(run())> promise;
  auto result = promise.get_future();
  start_thread([run = std::move(run), promise = std::move(promise)]() mutable {
    try {
      promise.set_value(run());
    } catch (...) {
      promise.set_exception(std::current_exception());
    }
  }).detach();
  return result;
}

}  // namespace tensorferry
