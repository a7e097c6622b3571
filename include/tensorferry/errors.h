/// What goes wrong, as exceptions: thrown by the calls of agent.h, by Future::get and by co_await. All derive from
/// Error; the text says what happened, on which peer, and what to do. Python has classes of the same names.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace tensorferry {

/// The base of all.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The call was cancelled before its answer came.
class Cancelled : public Error {
 public:
  using Error::Error;
};
/// Arguments do not fit the function (the text has its signature and what came), a result is not of the type asked for,
/// an option makes no sense.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};
/// No answer within the time-out; the callee may or may not have run the function.
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
/// A bound was reached: handlers that run at once, bytes in flight, memory.
class ResourceExhausted : public Error {
 public:
  using Error::Error;
};
/// No channel carries a tensor of the call, or the one that CallOptions::require names cannot.
class ChannelUnavailable : public Error {
 public:
  using Error::Error;
};
/// The peer died, left, or became unreachable.
class ConnectionLost : public Error {
 public:
  using Error::Error;
};
/// The peer sent what the protocol does not allow.
class ProtocolError : public Error {
 public:
  using Error::Error;
};
/// The peer did not prove that it knows the cluster key, or there is no key to listen beyond this host with.
class Unauthenticated : public Error {
 public:
  using Error::Error;
};
/// The agent was shut down, before the call or while it was in flight.
class AgentClosed : public Error {
 public:
  using Error::Error;
};
/// A mistake in TensorFerry, or a failure of the system underneath it.
class InternalError : public Error {
 public:
  using Error::Error;
};

/// The function raised over there: in Python an exception, in C++ one that is none of the above. what() has type, text,
/// peer and traceback.
class RemoteError : public Error {
 public:
  RemoteError(const std::string& what, std::string type_name, std::string message, std::string traceback,
              std::string peer)
      : Error(what),
        type_name_(std::move(type_name)),
        message_(std::move(message)),
        traceback_(std::move(traceback)),
        peer_(std::move(peer)) {}

  /// "builtins.ValueError", "std::out_of_range".
  [[nodiscard]] const std::string& type_name() const noexcept { return type_name_; }
  /// The exception's own text.
  [[nodiscard]] const std::string& message() const noexcept { return message_; }
  /// As Python prints it; "" of a C++ exception.
  [[nodiscard]] const std::string& traceback() const noexcept { return traceback_; }
  /// The agent that raised, by name.
  [[nodiscard]] const std::string& peer() const noexcept { return peer_; }

 private:
  std::string type_name_, message_, traceback_, peer_;
};

}  // namespace tensorferry
