/// The exceptions of the C++ API, thrown by the functions of agent.h, by Future::get and by co_await.
///
/// All derive from Error. The text says what happened, on which peer, and what to do. error_codes.h lists the classes
/// with their meanings. Python has classes of the same names.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "tensorferry/error_codes.h"

namespace tensorferry {

/// The base class of all exceptions here.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

#define TENSORFERRY_DECLARE_CLASS(number, code, Class, python, description) \
  class Class : public Error {                                              \
   public:                                                                  \
    using Error::Error;                                                     \
  };
TENSORFERRY_PLAIN_ERRORS(TENSORFERRY_DECLARE_CLASS)
#undef TENSORFERRY_DECLARE_CLASS

/// The called function raised an exception at the peer: any exception of Python's, or one of C++ that is none of
/// these classes. what() has the type, the text, the peer and the traceback.
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
