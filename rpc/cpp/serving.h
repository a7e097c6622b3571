/// Answers of calls that C++ functions serve.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "rpc/core/envelope.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/objects.h"
#include "rpc/cpp/reading.h"
#include "rpc/member/incoming_call.h"
#include "tensorferry/errors.h"

namespace tensorferry::detail {

/// Sends the answer of one call. If the call creates an object (RequestHead::creation), the answer becomes the value of
/// that object and the caller gets an empty reply. May outlive the call's arguments. Answers once.
class TypedReply final {
 public:
  TypedReply(std::shared_ptr<AgentCore> core, const PeerInfo& caller, Reply reply)
      : core_(std::move(core)), call_(*core_->member, caller, std::move(reply)) {}

  /// As IncomingCall::begin().
  bool begin(const RequestHead& head) { return call_.begin(head.call, head.timed, head.creation); }
  /// Answers with the value that `write` writes. If `write` returns false, this sends nothing: the function answers
  /// later. Passes on exceptions of `write`; the call is not answered then.
  template <class Write>
  void value(Write write) {
    const auto core = core_;  // send() may move it away
    Encoder out;
    begin_reply(out, ReplyKind::value);
    auto marshaller = call_.creates() ? ObjectMarshaller::keeping(*core_->member)
                                      : ObjectMarshaller(*core_->member, call_.caller().name, &call_.caller());
    ValueWriter writer(out, &marshaller, core->devices.devices.get());
    if (write(writer)) send(out, marshaller);
  }
  /// Answers with an exception that the function threw.
  void error(const std::exception_ptr& thrown);
  /// Answers with an error. If the call creates an object, its users get the error.
  void fail(const Status& status);

  [[nodiscard]] AgentCore& core() const noexcept { return *core_; }
  [[nodiscard]] IncomingCall& call() noexcept { return call_; }

 private:
  /// May move this away, to answer later.
  void send(Encoder& out, ObjectMarshaller& marshaller);

  std::shared_ptr<AgentCore> core_;
  IncomingCall call_;
};

/// Returns a handler that calls `body(core, request, reply)`. It does not keep `core` alive, and refuses calls when the
/// agent has left.
template <class Body>
Handler handler(const std::shared_ptr<AgentCore>& core, Body body) {
  return [weak = std::weak_ptr(core), body = std::move(body)](const Request& request, Reply reply) {
    auto self = weak.lock();
    if (!self) return reply.fail({Code::agent_closed, "the agent is leaving"});
    body(std::move(self), request, std::move(reply));
  };
}
/// Returns the same for calls whose arguments C++ reads: `body(reading, head, answer)` answers.
template <class Body>
Handler reading_handler(const std::shared_ptr<AgentCore>& core, Body body) {
  return handler(core, [body = std::move(body)](std::shared_ptr<AgentCore> self, const Request& request, Reply reply) {
    auto* here = self.get();
    TypedReply answer(std::move(self), request.peer, std::move(reply));
    const auto& devices = here->devices.devices;
    const auto streams = devices ? devices->use_streams_of(request.arguments.buffers) : nullptr;
    try {
      Reading reading(request.arguments, here);
      reading.come_from(answer.call().caller());
      const auto head = reading.request();
      if (answer.begin(head)) body(reading, head, answer);
    } catch (const Error&) {
      answer.error(std::current_exception());
    }
  });
}

/// Runs `function` with the arguments in `reading`, without the first `skipped`, which have been read already. `shown`
/// is the name of the function in errors. Answers once, now or when the function's future completes; exceptions of the
/// function go to the caller.
void run_function(Function& function, std::string_view shown, Reading& reading, const RequestHead& head,
                  std::size_t skipped, TypedReply answer);

}  // namespace tensorferry::detail
