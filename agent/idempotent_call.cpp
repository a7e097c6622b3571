#include "agent/idempotent_call.h"

#include <algorithm>
#include <utility>

#include "agent/link/engine.h"
#include "agent/link/link.h"
#include "base/out_of_memory.h"
#include "base/text.h"

namespace tensorferry {

IdempotentCall::IdempotentCall(std::shared_ptr<Engine> engine, std::string_view peer, std::shared_ptr<Call::State> call,
                               Message message)
    : engine_(std::move(engine)), peer_(peer), call_(std::move(call)), message_(std::move(message)) {}

void IdempotentCall::start(std::shared_ptr<Engine> engine, std::string_view peer, std::shared_ptr<Call::State> call,
                           Message message) {
  const bool by_value =
      std::all_of(message.sharing.begin(), message.sharing.end(), [](auto each) { return each == Sharing::by_value; });
  if (!by_value || call->options.order != 0) {
    const auto* const why = by_value ? "an idempotent call cannot have an order key"
                                     : "an idempotent call cannot share memory with the callee";
    call->complete(Status(Code::invalid_argument, why));
    return call->arguments.release();
  }
  const auto made =
      std::shared_ptr<IdempotentCall>(new IdempotentCall(std::move(engine), peer, std::move(call), std::move(message)));
  made->call_->idempotence.attempts = made;
  made->attempt();
}

void IdempotentCall::attempt() {
  out_of_memory::run_or([this] { begin_attempt(); }, [this] { finish(out_of_memory::status()); });
}

void IdempotentCall::begin_attempt() {
  const auto link = engine_->peers.link_to(peer_);
  if (reached_ && link->session() != reached_)
    return finish(Status(Code::connection_lost, formatted("the process of \"{}\" that had the call has ended", peer_)));
  auto options = call_->options;
  options.idempotent = false;
  options.label = call_->shown();
  if (call_->deadline) {
    const auto left = std::chrono::ceil<Milliseconds>(*call_->deadline - engine_->clock.now());
    options.timeout = std::max(left, Milliseconds(1));
  }
  const auto attempt = std::make_shared<Call::State>(call_->function, std::move(options), engine_->clock);
  attempt->link = link;
  attempt->idempotence.may_come_again = true;
  Call handle(attempt);
  handle.on_sent([call = call_](const Status&) { call->arguments.release(); });
  UniqueFunction<void(Result<Received>)> done = [self = shared_from_this(), attempt, link](Result<Received> result) {
    self->ended(*attempt, *link, std::move(result));
  };
  auto message = message_;  // before there is credit to give back
  const auto bytes = message.bytes();
  auto status = bytes != 0 ? link->acquire_credit(bytes, attempt->options) : Status();
  if (!status.ok()) return finish(std::move(status));
  attempt->cost.bytes = bytes;
  attempt->cost.device_time = call_->cost.device_time;
  call_->arguments.hold();
  link->start(attempt, std::move(message));
  // From here on nothing takes memory: the call ends when the attempt does, which may land in the caller's memory.
  bool cancelled = false;
  {
    const std::lock_guard lock(mutex_);
    attempt_ = attempt;  // not earlier: cancel() reads the number that start() gives it
    cancelled = cancelled_;
  }
  if (cancelled) out_of_memory::with_reserve([&] { handle.cancel(); });
  handle.on_done(std::move(done));
}

void IdempotentCall::ended(const Call::State& attempt, const Link& link, Result<Received> result) {
  if (result.ok() || attempt.idempotence.refused) return finish(std::move(result));
  const auto why = result.status();
  if (may_try_again(link, why)) {
    if (const auto session = link.session()) reached_ = session;
    bool again = false;
    out_of_memory::with_reserve(
        [&] { again = engine_->pool->submit_long([self = shared_from_this()] { self->attempt(); }); });
    if (again) return;
  }
  // NotFound: the name is free by now. But an earlier attempt reached a peer, which may have run the call and is gone.
  auto told = why;
  out_of_memory::with_reserve([&] {
    if (reached_ && why.code() == Code::not_found) told = {Code::connection_lost, std::string(why.what())};
  });
  finish(std::move(told));
}

bool IdempotentCall::may_try_again(const Link& link, const Status& why) {
  if (why.code() != Code::connection_lost || engine_->leaving) return false;
  if (call_->deadline && engine_->clock.now() >= *call_->deadline) return false;
  if (link.left_by_peer()) return false;
  const auto known = link.session();
  const auto& session = known ? known : reached_;  // none: the link never had a connection
  if (!session || session->dead() || session->process_ended() || (reached_ && reached_ != session)) return false;
  const std::lock_guard lock(mutex_);
  return !cancelled_;
}

void IdempotentCall::finish(Result<Received> result) {
  call_->complete(std::move(result));
  call_->arguments.release();
}

void IdempotentCall::cancel() {
  std::shared_ptr<Call::State> attempt;
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    attempt = attempt_;
  }
  if (attempt) Call(attempt).cancel();
}

}  // namespace tensorferry
