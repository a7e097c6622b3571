/// A call with RawCallOptions::idempotent: sends it again over the session's next link when the connection that carried
/// it is lost. Each attempt is a call of its own, and the callee does not tell them apart, so it may run several. The
/// user's handle (Call) has the outcome of the last one.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "agent/call_state.h"
#include "agent/handles.h"
#include "agent/message.h"
#include "base/mutex.h"

namespace tensorferry {

class Link;
class Session;
struct Engine;

/// One idempotent call. The completion of the attempt under way keeps it alive.
///
/// Threads: any. The first attempt begins on the caller's thread, and later ones on threads of the pool.
class IdempotentCall final : public std::enable_shared_from_this<IdempotentCall> {
 public:
  /// Makes the call whose outcome `call` gets. Ends it with InvalidArgument if the message shares memory, or if the
  /// call has an order key: a call that is sent again would overtake later ones of its key.
  static void start(std::shared_ptr<Engine> engine, std::string_view peer, std::shared_ptr<Call::State> call,
                    Message message);
  /// Cancels the attempt under way, and makes no other one.
  void cancel();

 private:
  IdempotentCall(std::shared_ptr<Engine> engine, std::string_view peer, std::shared_ptr<Call::State> call,
                 Message message);
  void attempt();
  void begin_attempt();
  void ended(const Call::State& attempt, const Link& link, Result<Received> result);
  void finish(Result<Received> result);
  [[nodiscard]] bool may_try_again(const Link& link, const Status& why);

  const std::shared_ptr<Engine> engine_;
  const std::string peer_;
  const std::shared_ptr<Call::State> call_;
  const Message message_;
  std::shared_ptr<Session> reached_;  // the session whose peer may have the call; used by one attempt after another

  Mutex mutex_;  // guards the next two
  std::shared_ptr<Call::State> attempt_;
  bool cancelled_ = false;
};

}  // namespace tensorferry
