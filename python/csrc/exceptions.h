/// Python exceptions across the wire: described where they are raised, raised again as what they were.
#pragma once

#include <string>

#include "python/csrc/codec.h"
#include "python/csrc/exposed.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// What a peer is told of `error`, raised by a function on the agent `self`.
RemoteException describe_exception(const py::error_already_set& error, const std::string& self);

/// Raises what a peer's reply holds: the exception itself, else one of the same type made from its text, else
/// RemoteError; its __cause__ is a RemoteTraceback with the peer's name. With `only`, of the types that it holds,
/// builtin ones and ours alone is one made.
[[noreturn]] void raise_remote(const RemoteException& described, py::object exception, const Exposed* only = nullptr);

}  // namespace tensorferry::python
