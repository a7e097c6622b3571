/// Conversions between Status, the exceptions of C++, and exceptions on the wire.
#pragma once

#include <exception>
#include <string>

#include "base/status.h"
#include "rpc/core/exception.h"

namespace tensorferry::detail {

/// Throws the class of errors.h that belongs to the code of `status`, which is not ok.
[[noreturn]] void throw_status(const Status& status);
/// Throws unless `status` is ok.
inline void check(const Status& status) {
  if (!status.ok()) throw_status(status);
}
/// Returns the value, or throws the Status.
template <class T>
T value_or_throw(Result<T> result) {
  if (!result.ok()) throw_status(result.status());
  return *std::move(result);
}

/// Throws `exception` as a RemoteError.
[[noreturn]] void throw_remote(const RemoteException& exception);

/// Converts an exception that a served function threw. Returns a Status if it is a class of errors.h other than
/// RemoteError. For any other exception returns ok and fills `described`; `self` is the name of this agent. A
/// RemoteError keeps the type, text, traceback and peer of the original exception.
Status describe_thrown(const std::exception_ptr& thrown, const std::string& self, RemoteException& described);

}  // namespace tensorferry::detail
