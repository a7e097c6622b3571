/// Carries Python exceptions to the caller: describes them at the callee, raises them again at the caller as their own
/// type. Needs the GIL.
#pragma once

#include <string>

#include "python/csrc/codec.h"
#include "python/csrc/exposed.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Describes `error`, raised by a function on the agent `self`, for the peer that called it.
RemoteException describe_exception(const py::error_already_set& error, const std::string& self);

/// Raises the exception that a peer's reply describes. Its __cause__ is a RemoteTraceback with the peer's name. The
/// first of these that is possible is raised:
/// - `exception`, rebuilt from the reply (null: not rebuilt);
/// - an exception of the same type, made from its text;
/// - RemoteError.
///
/// With `only`, an exception is made from text only if its type is builtin, of tensorferry.errors, or exposed in
/// `only`.
[[noreturn]] void raise_remote(const RemoteException& described, py::object exception, const Exposed* only = nullptr);

}  // namespace tensorferry::python
