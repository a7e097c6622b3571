// The owner's side: objects, from their creation until the last hold on them ends.
#include <utility>

#include "base/text.h"
#include "rpc/core/reference_proof.h"
#include "rpc/core/reference_transaction.h"
#include "rpc/core/references.h"

namespace tensorferry {

using references::OwnedObject;

namespace {

/// Bounds the objects that all peers together have named and whose create request has not come.
constexpr std::size_t most_awaited = std::size_t{1} << 20;

}  // namespace

std::shared_ptr<Reference> References::local_handle(const RRefId& object, std::string type_hint) {
  return std::shared_ptr<Reference>(
      new Reference(shared_from_this(), self_, Creation{object, {}}, std::move(type_hint), true));
}

std::shared_ptr<Reference> References::own(Outcome outcome, std::string type_hint) {
  Transaction transaction(*this);
  const auto number = ++last_.object;
  const RRefId id{self_.incarnation, number, nonce_of(self_.incarnation, number)};
  if (!closed_) {
    auto& object = objects_[id];
    object.state = OwnedObject::State::ready;
    object.outcome = std::move(outcome);
    object.locals = 1;
  }
  return local_handle(id, std::move(type_hint));
}

Status References::create(const AgentId& creator, const Creation& ids) {
  Transaction transaction(*this);
  if (closed_) return {Code::agent_closed, formatted("agent {} was shut down", self_.name)};
  if (ids.object.incarnation != creator.incarnation) {
    return {Code::protocol_error, formatted("{} asks for an object under another agent's number", creator.name)};
  }
  if (creator.incarnation == self_.incarnation) {  // begin_creation() has made it
    const auto object = objects_.find(ids.object);
    if (object == objects_.end() || object->second.state != OwnedObject::State::awaited) {
      return {Code::cancelled, "the creation of this object was cancelled"};
    }
    begin_running(object);
    return {};
  }
  if (ids.fork.incarnation != creator.incarnation) {
    return {Code::protocol_error, formatted("{} asks for a hold under another agent's number", creator.name)};
  }
  if (auto may = may_use(creator, ids.object, ids.fork); !may.ok()) return may;
  if (past_.deceased.contains(creator.incarnation)) {
    return {Code::connection_lost, formatted("{} asked for an object, and has ended", creator.name)};
  }
  auto& created = peer_of(creator).created;
  if (created.contains(ids.object.counter)) return {Code::cancelled, "the creation of this object was cancelled"};
  const auto object = find_or_await(ids.object, &creator);
  if (object == objects_.end()) return {Code::resource_exhausted, "too many objects are awaited"};
  if (object->second.state != OwnedObject::State::awaited)
    return {Code::cancelled, "the creation of this object was cancelled"};
  if (auto status = add_fork(object->second, ids.fork, creator); !status.ok()) {
    free_if_unused(transaction, object);
    return status;
  }
  created.insert(ids.object.counter);
  begin_running(object);
  return {};
}

bool References::comes_again(const AgentId& creator, const Creation& ids) const {
  const std::lock_guard lock(mutex_);
  const auto object = objects_.find(ids.object);
  if (object == objects_.end() || object->second.state == OwnedObject::State::awaited) return false;
  const auto fork = object->second.forks.find(ids.fork);
  return fork != object->second.forks.end() && fork->second == creator.incarnation;
}

void References::begin_running(Objects::iterator object) {
  end_awaiting(object->second);
  object->second.state = OwnedObject::State::running;
}

/// Counts an object in state `awaited` no more.
void References::end_awaiting(OwnedObject& object) {
  --awaited_;
  const auto peer = peers_.find(std::exchange(object.named_by, 0));
  if (peer != peers_.end() && peer->second.awaited != 0) --peer->second.awaited;
}

/// Adds the fork by which `holder` holds the object. ResourceExhausted: it holds too many.
Status References::add_fork(OwnedObject& object, const ForkId& fork, const AgentId& holder) {
  if (object.forks.contains(fork)) return {};
  if (holder.incarnation != self_.incarnation) {
    auto& held = peer_of(holder).forks;
    if (held >= most_forks_of_a_peer) {
      return {Code::resource_exhausted,
              formatted("\"{}\" holds {} references to objects of \"{}\", as many as an agent "
                        "may",
                        holder.name, held, self_.name)};
    }
    ++held;
  }
  object.forks.emplace(fork, holder.incarnation);
  return {};
}

/// Removes the fork from the object, if the object has it.
void References::drop_fork(OwnedObject& object, const ForkId& fork) {
  const auto at = object.forks.find(fork);
  if (at == object.forks.end()) return;
  const auto holder = peers_.find(at->second);
  if (holder != peers_.end() && holder->second.forks != 0) --holder->second.forks;
  object.forks.erase(at);
}

void References::fulfil(const RRefId& id, Result<Outcome> outcome) {
  Transaction transaction(*this);
  const auto object = objects_.find(id);
  if (object == objects_.end() || object->second.state != OwnedObject::State::running) {
    if (outcome.ok()) transaction.discard(std::move(outcome->value));
    return;
  }
  finish(transaction, object, std::move(outcome));
}

void References::finish(Transaction& transaction, Objects::iterator at, Result<Outcome> outcome) {
  auto& object = at->second;
  if (object.state == OwnedObject::State::awaited) end_awaiting(object);
  object.state = outcome.ok() ? OwnedObject::State::ready : OwnedObject::State::failed;
  if (outcome.ok()) {
    object.outcome = *outcome;
  } else {
    object.failure = outcome.status();
  }
  for (auto& waiter : std::exchange(object.waiters, {})) {
    transaction.later([completion = std::move(waiter.completion), outcome] { completion(outcome); });
  }
  free_if_unused(transaction, at);
}

void References::free_if_unused(Transaction& transaction, Objects::iterator at) {
  auto& object = at->second;
  if (object.locals != 0 || !object.forks.empty() || !object.waiters.empty()) return;
  if (object.state == OwnedObject::State::running) return;  // fulfil() frees it
  if (object.state == OwnedObject::State::awaited) end_awaiting(object);
  transaction.discard(std::move(object.outcome.value));
  objects_.erase(at);
}

/// Returns the object. If it does not exist and its create request may still come, makes it in state `awaited`. Returns
/// end() if the object is gone (why_gone() says why), or if too many are awaited. `named_by`: the peer that names it,
/// whose awaited objects are counted; null: the caller's own bound holds.
References::Objects::iterator References::find_or_await(const RRefId& id, const AgentId* named_by) {
  const auto object = objects_.find(id);
  if (object != objects_.end()) return object;
  if (id.incarnation == self_.incarnation || past_.deceased.contains(id.incarnation)) return objects_.end();
  const auto creator = peers_.find(id.incarnation);
  if (creator != peers_.end() && creator->second.created.contains(id.counter)) return objects_.end();
  if (awaited_ >= most_awaited) return objects_.end();
  auto* const peer = named_by != nullptr ? &peer_of(*named_by) : nullptr;
  if (peer != nullptr && peer->awaited >= most_awaited_of_a_peer) return objects_.end();
  const auto made = objects_.try_emplace(id).first;
  ++awaited_;
  if (peer == nullptr) return made;
  ++peer->awaited;
  made->second.named_by = named_by->incarnation;
  return made;
}

std::string References::why_gone(const RRefId& id) const {
  if (past_.deceased.contains(id.incarnation)) {
    return formatted("the object that this reference names on {} is gone: the agent that had created it is",
                     self_.name);
  }
  return formatted(
      "the object that this reference names on {} was freed: an agent that passed the reference on is gone",
      self_.name);
}

Status References::may_use(const AgentId& user, const RRefId& object, const ForkId& fork) const {
  if (user.incarnation == self_.incarnation || proves(object, fork, user.incarnation)) return {};
  return {Code::permission_denied, formatted("\"{}\" holds no reference to the object {}:{} of \"{}\"", user.name,
                                             object.incarnation, object.counter, self_.name)};
}

void References::fetch(const RRefId& id, std::optional<Clock::time_point> deadline,
                       UniqueFunction<void(Result<Outcome>)> completion, const ForkId& by) {
  Transaction transaction(*this);
  const auto complete = [&](Result<Outcome> outcome) {
    transaction.later([completion = std::move(completion), outcome = std::move(outcome)] { completion(outcome); });
  };
  if (closed_) return complete(Status(Code::agent_closed, formatted("agent {} was shut down", self_.name)));
  const auto at = find_or_await(id, nullptr);  // each waits in a call, and the open calls are bounded
  if (at == objects_.end()) return complete(Status(Code::not_found, why_gone(id)));
  auto& object = at->second;
  if (object.state == OwnedObject::State::ready) return complete(object.outcome);
  if (object.state == OwnedObject::State::failed) return complete(object.failure);
  if (by != ForkId{} && by == object.given_up) return complete(object.failure);

  const auto number = ++last_.waiter;
  object.waiters.push_back({number, std::move(completion), by});
  if (!deadline) return;
  const auto left = std::chrono::ceil<Milliseconds>(*deadline - network_->clock().now());
  transaction.later([network = network_, weak = weak_from_this(), left = std::max(left, Milliseconds(0)), id, number] {
    network->after(left, [weak, id, number] {
      if (const auto references = weak.lock()) references->expire(id, number);
    });
  });
}

void References::expire(const RRefId& id, std::uint64_t number) {
  Transaction transaction(*this);
  const auto at = objects_.find(id);
  if (at == objects_.end()) return;
  auto& waiters = at->second.waiters;
  for (auto waiter = waiters.begin(); waiter != waiters.end(); ++waiter) {
    if (waiter->number != number) continue;
    transaction.later([completion = std::move(waiter->completion), name = self_.name] {
      completion(Status(Code::deadline_exceeded, formatted("the object on {} was not there in time", name)));
    });
    waiters.erase(waiter);
    return free_if_unused(transaction, at);
  }
}

/// Ends the fetches by the creator's hold `by`, which has given the creation up. Other holders still get the object.
void References::give_up(Transaction& transaction, OwnedObject& object, const ForkId& by, const Status& why) {
  object.given_up = by;
  object.failure = why;
  std::erase_if(object.waiters, [&](OwnedObject::Waiter& waiter) {
    if (waiter.by != by) return false;
    transaction.later([completion = std::move(waiter.completion), why] { completion(why); });
    return true;
  });
}

}  // namespace tensorferry
