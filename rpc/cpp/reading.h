/// The values of one message that came, as typed code reads them: `again` resolved, mismatches told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "agent/agent.h"
#include "rpc/core/codec.h"
#include "rpc/core/envelope.h"
#include "rpc/core/exception.h"
#include "tensorferry/values.h"

namespace tensorferry::detail {

class AgentCore;

/// Arguments do not fit: who serves the call says how. Never leaves the library.
struct Mismatch {};

/// A value that came before and is referred to (Tag::again) is read once more from where it stands: with a Decoder of
/// its own, which goes through the message again up to there. What that may cost is bounded by the message's size.
class Reading {
 public:
  /// `message` outlives this. Null `core`: references are refused.
  Reading(const Received& message, AgentCore* core);

  // ---- the envelope
  RequestHead request();
  ReplyKind reply();
  RemoteException exception() { return read_exception(main_); }
  /// Arguments: after the positional ones. Names and places of keyword ones; to be put before the reader one by one.
  const std::vector<std::string_view>& keywords();
  void go_to_keyword(std::size_t index);
  /// Throws ProtocolError where bytes are left over, or the message is broken.
  void finish();

  // ---- for ValueReader
  /// What comes next; stays until take().
  Tag peek();
  Decoder& take() {
    peeked_ = false;
    return current();
  }
  void leave();
  /// Accounts for bytes of a value that are copied.
  void charge(std::size_t bytes);
  [[noreturn]] void mismatch(const std::string& expected);
  [[noreturn]] void broken();
  [[nodiscard]] const Received& message() const noexcept { return message_; }
  [[nodiscard]] AgentCore* core() const noexcept { return core_; }

  /// Of a result: what it is of, and what it is to be.
  void expect_result(std::string_view function, std::string_view peer, std::string (*wanted)()) {
    function_ = function;
    peer_ = peer;
    wanted_ = wanted;
  }
  /// Whose message it is, for references; an incarnation of 0: whichever passed them on.
  void come_from(AgentId sender) { sender_ = std::move(sender); }
  [[nodiscard]] const AgentId& sender() const noexcept { return sender_; }

 private:
  struct Again {
    std::unique_ptr<Decoder> in;
    std::size_t open = 0;    // containers of it that have begun
    bool delivered = false;  // its value has been given out
  };
  Decoder& current() { return again_.empty() ? main_ : *again_.back().in; }
  void drop_finished();
  std::unique_ptr<Decoder> at_beginning() const;
  Tag seek(std::uint32_t number);

  const Received& message_;
  AgentCore* core_;
  AgentId sender_;
  Decoder main_;
  std::vector<Again> again_;
  Tag tag_ = Tag::invalid;
  bool peeked_ = false;
  bool is_request_ = false;
  RequestHead head_;
  std::vector<std::string_view> keywords_;
  bool keywords_read_ = false;
  std::size_t budget_;
  std::string_view function_, peer_;
  std::string (*wanted_)() = nullptr;
};

/// What the next value of `in` is, in Python's words: "str", "float32 tensor", "tuple[int, str]".
std::string describe_value(Decoder& in, std::size_t depth = 0);
/// "(str, n=int)" for the arguments of a request.
std::string describe_arguments(const Received& message);

}  // namespace tensorferry::detail
