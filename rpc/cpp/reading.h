/// Reader of one received message for typed code: follows back-references (Tag::again) and reports mismatched types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "agent/agent.h"
#include "rpc/core/decoder.h"
#include "rpc/core/envelope.h"
#include "rpc/core/exception.h"
#include "tensorferry/values.h"

namespace tensorferry::detail {

class AgentCore;

/// Thrown when arguments do not fit the served function; run_function() turns it into InvalidArgument. Never leaves the
/// library.
struct Mismatch {};

/// Reads one message, value by value. Used by one thread.
///
/// A back-reference (Tag::again) to an earlier value reads that value once more, with a new Decoder that goes through
/// the message again up to the value. A budget in proportion to the message's size bounds the cost; beyond it, reading
/// throws InvalidArgument.
class Reading {
 public:
  /// `message` must outlive this. If `core` is null, references are refused.
  Reading(const Received& message, AgentCore* core);

  // ---- the envelope
  /// Reads the head of a request; the positional arguments follow. Throws ProtocolError if the message is broken.
  RequestHead request();
  /// Reads the head of a reply; the result, or the exception, follows. Throws ProtocolError if the message is broken.
  ReplyKind reply();
  /// Reads the exception of a reply.
  RemoteException exception() { return read_exception(main_); }
  /// Returns the names of the keyword arguments; called after the positional arguments have been read. Throws
  /// ProtocolError if the message is broken.
  const std::vector<std::string_view>& keywords();
  /// Makes the value of keyword argument `index` the next value.
  void go_to_keyword(std::size_t index);
  /// Throws ProtocolError if bytes are left over or the message is broken.
  void finish();

  // ---- for ValueReader
  /// Returns the tag of the next value, which stays the next one until take(). Throws ProtocolError if the message is
  /// broken.
  Tag peek();
  /// Returns the decoder that stands at the value of the last peek().
  Decoder& take() {
    peeked_ = false;
    return current();
  }
  /// Ends the innermost container.
  void leave();
  /// Charges the copy of `bytes` bytes of a value to the budget, if a back-reference is being read.
  void charge(std::size_t bytes);
  /// Throws Mismatch for an argument, InvalidArgument for a result.
  [[noreturn]] void mismatch(const std::string& expected);
  /// Throws the error of a broken message.
  [[noreturn]] void broken();
  [[nodiscard]] const Received& message() const noexcept { return message_; }
  [[nodiscard]] AgentCore* core() const noexcept { return core_; }

  /// The value of the last take() was a container, and has been read whole without leave().
  void read_whole() noexcept {
    if (!again_.empty() && again_.back().open != 0) --again_.back().open;
  }
  /// Returns the place for the reader of another library's tensors. The first value that needs one fills it, because
  /// tensors in one buffer share one storage.
  std::shared_ptr<void>& foreign_tensors() noexcept { return foreign_tensors_; }

  /// Sets, for the errors of a result, the function and peer that returned it and the name of the expected type.
  void expect_result(std::string_view function, std::string_view peer, std::string (*wanted)()) {
    function_ = function;
    peer_ = peer;
    wanted_ = wanted;
  }
  /// Sets the sender of the message, which passed its references on. Incarnation 0: the one that each reference's
  /// record names.
  void come_from(AgentId sender) { sender_ = std::move(sender); }
  [[nodiscard]] const AgentId& sender() const noexcept { return sender_; }

 private:
  struct Again {
    std::unique_ptr<Decoder> in;
    std::size_t open = 0;    // number of its containers that have begun and not ended
    bool delivered = false;  // its value has been returned by peek()
  };
  Decoder& current() { return again_.empty() ? main_ : *again_.back().in; }
  void drop_finished();
  std::unique_ptr<Decoder> at_beginning() const;
  Tag seek(std::uint32_t number);

  const Received& message_;
  AgentCore* core_;
  AgentId sender_;
  Decoder main_;
  std::shared_ptr<void> foreign_tensors_;
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

/// Returns the type of the next value of `in` in Python's terms: "str", "float32 tensor", "tuple[int, str]".
std::string describe_value(Decoder& in, std::size_t depth = 0);
/// Returns the types of a request's arguments: "(str, n=int)".
std::string describe_arguments(const Received& message);

}  // namespace tensorferry::detail
