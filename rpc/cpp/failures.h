/// Between the engine's Status, exceptions in C++, and exceptions on the wire.
#pragma once

#include <exception>
#include <string>

#include "channels/status.h"
#include "rpc/core/exception.h"

namespace tensorferry::detail {

/// As the class of errors.h that its code stands for. `status` is not ok.
[[noreturn]] void throw_status(const Status& status);
inline void check(const Status& status) {
  if (!status.ok()) throw_status(status);
}
template <class T>
T value_or_throw(Result<T> result) {
  if (!result.ok()) throw_status(result.status());
  return *std::move(result);
}

/// As RemoteError.
[[noreturn]] void throw_remote(const RemoteException& exception);

/// What a served function threw: the Status of one of errors.h (but for RemoteError), else ok and `described` is set.
Status describe_thrown(const std::exception_ptr& thrown, const std::string& self, RemoteException& described);

}  // namespace tensorferry::detail
