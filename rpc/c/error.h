/// Errors of the C interface, made of exceptions.
#pragma once

#include <exception>

#include "tensorferry/c.h"

namespace tensorferry::c {

/// Returns the exception as an error of the caller's. If there is no memory for it, returns one that says so, and that
/// tferry_error_free leaves alone.
tferry_error* error_of(const std::exception_ptr& thrown) noexcept;

/// Runs `function`. Returns null, or the error that it threw.
template <class Function>
tferry_error* guarded(Function&& function) noexcept {
  try {
    function();
    return nullptr;
  } catch (...) {
    return error_of(std::current_exception());
  }
}

}  // namespace tensorferry::c
