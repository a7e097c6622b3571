/// Answers of calls that C++ functions serve.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "rpc/core/envelope.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/objects.h"
#include "rpc/cpp/reading.h"

namespace tensorferry::detail {

/// Sends the answer of one call. If the call creates an object (RequestHead::creation), the answer becomes the value of
/// that object and the caller gets an empty reply. May outlive the call's arguments. Answers once.
class TypedReply final {
 public:
  TypedReply(std::shared_ptr<AgentCore> core, const PeerInfo& caller, Reply reply)
      : core_(std::move(core)),
        caller_{caller.name, caller.incarnation},
        rank_(caller.rank),
        reply_(std::move(reply)) {}

  /// Begins the answer after the request's head has been read. Returns false if the request's object may not be
  /// created; the error has been sent then.
  bool begin(const RequestHead& head);
  /// Answers with the value that `write` writes. If `write` returns false, this sends nothing: the function answers
  /// later. Passes on exceptions of `write`; the call is not answered then.
  template <class Write>
  void value(Write write) {
    Encoder out;
    begin_reply(out, ReplyKind::value);
    auto marshaller =
        creation_ ? ReferenceMarshaller::keeping(*core_) : ReferenceMarshaller(*core_, caller_.name, &caller_);
    ValueWriter writer(out, &marshaller);
    if (write(writer)) send(out, marshaller);
  }
  /// Answers with an exception that the function threw.
  void error(const std::exception_ptr& thrown);
  /// Answers with an error.
  void fail(const Status& status);

  [[nodiscard]] AgentCore& core() const noexcept { return *core_; }
  [[nodiscard]] const AgentId& caller() const noexcept { return caller_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] const Reply& reply() const noexcept { return reply_; }

 private:
  void send(Encoder& out, ReferenceMarshaller& marshaller);
  /// Makes `thing` the value of the object that the call creates, and sends an empty reply.
  void keep(std::shared_ptr<RemoteValue> thing, bool raised);

  std::shared_ptr<AgentCore> core_;
  AgentId caller_;
  int rank_;
  Reply reply_;
  std::uint64_t call_ = 0;
  std::optional<Creation> creation_;
};

/// Runs `function` with the arguments in `reading`, without the first `skipped`, which have been read already. `shown`
/// is the name of the function in errors. Answers once, now or when the function's future completes; exceptions of the
/// function go to the caller.
void run_function(Function& function, std::string_view shown, Reading& reading, const RequestHead& head,
                  std::size_t skipped, TypedReply answer);

}  // namespace tensorferry::detail
