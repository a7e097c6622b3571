/// Completes futures of torch's on threads of ours.
#pragma once

#include <ATen/core/ivalue.h>

#include <exception>
#include <utility>

#include "base/foreign_code.h"

namespace tensorferry {

/// Runs `complete`, which completes `future` and so runs its callbacks. What it throws before the future has completed
/// becomes the future's error. What a callback throws is logged; torch then skips the future's other callbacks.
template <class Complete>
void settle(c10::ivalue::Future& future, const Complete& complete) noexcept {
  run_foreign("a callback of a torch.futures.Future", [&] {
    try {
      complete();
    } catch (const abi::__forced_unwind&) {
      throw;
    } catch (...) {
      if (future.completed()) throw;
      future.setError(std::current_exception());
    }
  });
}

/// Completes `future` with an error, as settle() does.
inline void settle_error(c10::ivalue::Future& future, std::exception_ptr error) noexcept {
  settle(future, [&] { future.setError(std::move(error)); });
}

}  // namespace tensorferry
