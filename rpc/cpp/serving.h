/// A call that a function of C++ is answering.
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

/// Where the answer of a call goes, which may outlive the call's arguments: to its caller, or, where the call creates
/// an object, to that.
class Answer final {
 public:
  Answer(std::shared_ptr<AgentCore> core, const PeerInfo& caller, Reply reply)
      : core_(std::move(core)),
        caller_{caller.name, caller.incarnation},
        rank_(caller.rank),
        reply_(std::move(reply)) {}

  /// With what the request says. False: refused, and answered.
  bool begin(const RequestHead& head);
  /// `write` writes one value, or returns false: then the answer has gone another way. May throw, and has not answered
  /// then.
  template <class Write>
  void value(Write write) {
    Encoder out;
    begin_reply(out, ReplyKind::value);
    auto crossing = creation_ ? Crossing::keeping(*core_) : Crossing(*core_, caller_.name, &caller_);
    ValueWriter writer(out, &crossing);
    if (write(writer)) send(out, crossing);
  }
  void error(const std::exception_ptr& thrown);
  void fail(const Status& status);

  [[nodiscard]] AgentCore& core() const noexcept { return *core_; }
  [[nodiscard]] const AgentId& caller() const noexcept { return caller_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] const Reply& reply() const noexcept { return reply_; }

 private:
  void send(Encoder& out, Crossing& crossing);
  void keep(std::shared_ptr<RemoteThing> thing, bool raised);

  std::shared_ptr<AgentCore> core_;
  AgentId caller_;
  int rank_;
  Reply reply_;
  std::uint64_t call_ = 0;
  std::optional<Creation> creation_;
};

/// Runs `function` with the arguments of `request`, but for the first `skipped`, which have been read from `reading`.
/// `shown`: what errors call it.
void run_function(Function& function, std::string_view shown, Reading& reading, const RequestHead& head,
                  std::size_t skipped, Answer answer);

}  // namespace tensorferry::detail
