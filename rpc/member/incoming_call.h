/// A call of a peer, as the agent that serves it answers it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "rpc/core/envelope.h"
#include "rpc/core/method_target.h"
#include "rpc/member/member.h"

namespace tensorferry {

/// The answer to one call: a value, an exception or an error to the caller, or the value of the object that the call
/// creates (RequestHead::creation). Answers once. Used by one thread at a time; `member` must outlive it.
class IncomingCall final {
 public:
  IncomingCall(const Member& member, const PeerInfo& caller, Reply reply)
      : member_(&member), caller_{caller.name, caller.incarnation}, rank_(caller.rank), reply_(std::move(reply)) {}

  /// Takes the head of the request: the caller's number of the call, whether the caller set the deadline, and the
  /// object to create. False: the object may not be created, and the caller has been answered with the error; or the
  /// request has come before, and the caller gets the answer when the first one has run.
  bool begin(std::uint64_t call, bool timed, const std::optional<Creation>& creation);
  /// Returns whether the call creates an object: keep() then answers it.
  [[nodiscard]] bool creates() const noexcept { return creation_.has_value(); }
  /// Makes `outcome` the value of the object that the call creates, and answers with an empty value.
  void keep(Outcome outcome);
  /// Answers with `message`, which carries the references in `transfer`. Blocks if the message has bytes and exceeds
  /// the bound on bytes in flight.
  void send(Message message, ReferenceTransfer transfer);
  /// Fails the call. Users of an object that the call was to create get the error too.
  void fail(const Status& status);

  /// Reads the request of a fetch, instead of begin(). Errors: ProtocolError; those of check_use().
  Result<Fetch> begin_fetch(const Received& request);
  /// Reads the first argument of `tf:method` and `tf:next`. Errors: as begin_fetch().
  [[nodiscard]] Result<MethodTarget> target_of(ByteView argument) const;

  /// Returns a flag that becomes true when the caller gives the call up; the same one each time.
  std::shared_ptr<std::atomic<bool>> given_up();

  [[nodiscard]] const AgentId& caller() const noexcept { return caller_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] Reply& reply() noexcept { return reply_; }
  [[nodiscard]] const Reply& reply() const noexcept { return reply_; }
  /// Returns the deadline that the function's own calls inherit: the call's, if the caller set it. nullopt: the call
  /// has none, or its time-out is the caller's default, which bounds this call alone. Valid after begin().
  [[nodiscard]] std::optional<Clock::time_point> inherited_deadline() const {
    return timed_ ? reply_.deadline() : std::nullopt;
  }
  /// Returns the caller's number of the call; valid after begin().
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

 private:
  void answer_as_before(const Creation& creation);
  /// Returns whether the caller may use the object that `target` (a Fetch or MethodTarget) names. ConnectionLost: it
  /// was on an earlier incarnation of this agent. PermissionDenied (References::may_use), which is logged too.
  template <class Target>
  [[nodiscard]] Status check_use(const Target& target, std::string_view function) const;

  const Member* member_;
  AgentId caller_;
  int rank_;
  Reply reply_;
  std::uint64_t number_ = 0;
  bool timed_ = false;
  std::optional<Creation> creation_;
  std::shared_ptr<std::atomic<bool>> given_up_;  // null: given_up() has not been called
};

}  // namespace tensorferry
