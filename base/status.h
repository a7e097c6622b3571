/// The one error type of the C++ layers: a code, and a sentence. The sentence says what happened, to which peer, on
/// which channel, and what to do. Exceptions exist at the API edges only (Python, embedded C++).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace tensorferry {

/// Codes of errors. The numbers travel in error replies (docs/protocol.md, "Frames", "Errors"): never renumber them.
enum class Code : std::uint8_t {
  ok = 0,
  cancelled = 1,
  invalid_argument = 2,
  deadline_exceeded = 3,
  not_found = 4,            // no such agent, function or object
  permission_denied = 5,    // the peer may not call this
  resource_exhausted = 6,   // a bound was reached: handlers, bytes in flight, memory
  channel_unavailable = 7,  // no channel of the device pair carries this buffer
  connection_lost = 8,
  protocol_error = 9,
  unauthenticated = 10,
  remote_error = 11,  // the handler failed
  agent_closed = 12,  // this agent was shut down
  internal = 13,
};

/// Returns the name that users see: "DeadlineExceeded", "ConnectionLost", ...
std::string_view name_of(Code code) noexcept;

/// The result of an operation. If ok, it is a null pointer and cheap to pass; otherwise it shares an immutable error.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  Status(Code code, std::string what) : error_(std::make_shared<const Error>(code, std::move(what))) {}

  [[nodiscard]] bool ok() const noexcept { return error_ == nullptr; }
  explicit operator bool() const noexcept { return ok(); }
  [[nodiscard]] Code code() const noexcept { return error_ ? error_->code : Code::ok; }
  [[nodiscard]] std::string_view what() const noexcept {
    return error_ ? std::string_view(error_->what) : std::string_view{};
  }
  /// Returns "DeadlineExceeded: ..."; "Ok" if ok.
  [[nodiscard]] std::string text() const;

 private:
  struct Error {
    Error(Code c, std::string w) : code(c), what(std::move(w)) {}
    Code code;
    std::string what;
  };
  std::shared_ptr<const Error> error_;
};

/// A value, or the status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::in_place_index<0>, std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : value_(std::in_place_index<1>, std::move(status)) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] bool ok() const noexcept { return value_.index() == 0; }
  explicit operator bool() const noexcept { return ok(); }
  [[nodiscard]] Status status() const { return ok() ? Status() : std::get<1>(value_); }
  T& operator*() & { return std::get<0>(value_); }
  const T& operator*() const& { return std::get<0>(value_); }
  T&& operator*() && { return std::get<0>(std::move(value_)); }
  T* operator->() { return &std::get<0>(value_); }
  const T* operator->() const { return &std::get<0>(value_); }

 private:
  std::variant<T, Status> value_;
};

}  // namespace tensorferry
