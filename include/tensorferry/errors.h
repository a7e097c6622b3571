/// The exceptions of the C++ API, thrown by the functions of agent.h, by Future::get and by co_await.
///
/// All derive from Error. The text says what happened, on which peer, and what to do. Python has classes of the same
/// names.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace tensorferry {

/// The base class of all exceptions here.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The call was cancelled before its reply came.
class Cancelled : public Error {
 public:
  using Error::Error;
};
/// One of these is invalid:
///
/// - an argument, which cannot be sent, or does not fit the function (the text has the function's signature and the
///   types that came);
/// - the result, which has another type than the caller asked for;
/// - an option, which makes no sense.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};
/// No reply came within the time-out. The callee may or may not have run the function.
class DeadlineExceeded : public Error {
 public:
  using Error::Error;
};
/// There is no agent, function, method or object of that name.
class NotFound : public Error {
 public:
  using Error::Error;
};
/// The callee does not let this peer call that function.
class PermissionDenied : public Error {
 public:
  using Error::Error;
};
/// A bound was reached: on functions that run at once, bytes in flight, or memory.
class ResourceExhausted : public Error {
 public:
  using Error::Error;
};
/// No channel can carry a tensor of the call, or the channel that CallOptions::require names cannot.
class ChannelUnavailable : public Error {
 public:
  using Error::Error;
};
/// The peer died, left, or became unreachable.
class ConnectionLost : public Error {
 public:
  using Error::Error;
};
/// The peer sent bytes that the protocol does not allow.
class ProtocolError : public Error {
 public:
  using Error::Error;
};
/// The peer did not prove that it knows the cluster key, or this agent has no key and would listen beyond this host.
class Unauthenticated : public Error {
 public:
  using Error::Error;
};
/// The agent left before the call or while the call was in flight.
class AgentClosed : public Error {
 public:
  using Error::Error;
};
/// A bug in TensorFerry, or a failure of the operating system or the driver below it.
class InternalError : public Error {
 public:
  using Error::Error;
};

/// The called function raised an exception at the peer: any exception of Python's, or one of C++ that is none of the
/// above. what() has the type, the text, the peer and the traceback.
class RemoteError : public Error {
 public:
  RemoteError(const std::string& what, std::string type_name, std::string message, std::string traceback,
              std::string peer)
      : Error(what),
        type_name_(std::move(type_name)),
        message_(std::move(message)),
        traceback_(std::move(traceback)),
        peer_(std::move(peer)) {}

  /// The name of the exception's type: "builtins.ValueError", "std::out_of_range".
  [[nodiscard]] const std::string& type_name() const noexcept { return type_name_; }
  /// The exception's own text.
  [[nodiscard]] const std::string& message() const noexcept { return message_; }
  /// The traceback as Python prints it; "" for a C++ exception.
  [[nodiscard]] const std::string& traceback() const noexcept { return traceback_; }
  /// The name of the agent where the exception was raised.
  [[nodiscard]] const std::string& peer() const noexcept { return peer_; }

 private:
  std::string type_name_, message_, traceback_, peer_;
};

}  // namespace tensorferry
