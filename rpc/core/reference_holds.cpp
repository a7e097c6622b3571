// The user's side: holds on peers' objects, and forks of them on their way to a receiver.
#include <utility>

#include "base/text.h"
#include "rpc/core/reference_proof.h"
#include "rpc/core/reference_transaction.h"
#include "rpc/core/references.h"

namespace tensorferry {

using references::Child;
using references::Hold;
using references::OwnedObject;

namespace {

Status gone(const AgentId& owner) {
  return {Code::connection_lost, formatted("{}, which owned the object of this reference, is gone", owner.name)};
}

}  // namespace

std::shared_ptr<Reference> References::begin_creation(const AgentId& owner, std::string type_hint) {
  Transaction transaction(*this);
  if (owner.incarnation == self_.incarnation) {
    const auto number = ++last_.object;
    const RRefId id{self_.incarnation, number, nonce_of(self_.incarnation, number)};
    if (!closed_) {
      objects_[id].locals = 2;  // the handle, and the creation until end_creation()
      ++awaited_;
    }
    return local_handle(id, std::move(type_hint));
  }
  Creation ids{{self_.incarnation, 0}, {self_.incarnation, ++last_.fork}};
  if (!closed_) {
    const bool dead = past_.deceased.contains(owner.incarnation);
    if (!dead) ids.object.counter = ++peer_of(owner).objects;
    ids.object.nonce = nonce_of(owner.incarnation, ids.object.counter);
    ids.fork.nonce = proof_of(ids.object, ids.fork, self_.incarnation);
    auto& hold = holds_[ids.fork];
    hold.owner = owner;
    hold.object = ids.object;
    if (dead) lose(transaction, hold, gone(owner));
  }
  return std::shared_ptr<Reference>(new Reference(shared_from_this(), owner, ids, std::move(type_hint), false));
}

void References::end_creation(const Reference& reference, const Status& status) {
  Transaction transaction(*this);
  if (reference.is_owner()) {
    const auto object = objects_.find(reference.object());
    if (object == objects_.end()) return;
    --object->second.locals;
    if (!status.ok() && object->second.state == OwnedObject::State::awaited) return finish(transaction, object, status);
    return free_if_unused(transaction, object);
  }
  const auto hold = holds_.find(reference.ids().fork);
  if (hold == holds_.end() || hold->second.state != Hold::State::creating) return;
  if (status.ok()) {
    confirm(transaction, hold->second);
  } else {
    hold->second.abandon = true;
    lose(transaction, hold->second, status);
  }
  release_if_done(transaction, hold);
}

Result<ReferenceRecord> References::pass(const Reference& reference, const AgentId& receiver) {
  const std::lock_guard lock(mutex_);
  if (reference.references_.get() != this) {
    return Status(Code::invalid_argument, "a reference of one agent cannot be sent by another agent of the process");
  }
  if (closed_) return Status(Code::agent_closed, formatted("agent {} was shut down", self_.name));
  if (receiver.incarnation == 0) {
    return Status(Code::invalid_argument, "a reference can be sent only to an agent whose incarnation is known");
  }
  if (past_.deceased.contains(receiver.incarnation)) {
    return Status(Code::connection_lost, formatted("{}, the receiver of a reference, is gone", receiver.name));
  }
  ForkId fork{self_.incarnation, last_.fork + 1};
  fork.nonce = proof_of(reference.object(), fork, receiver.incarnation);
  Child child;
  child.receiver = receiver;
  child.object = reference.object();
  if (reference.is_owner()) {
    if (auto status = add_fork(objects_.at(reference.object()), fork, receiver); !status.ok()) return status;
  } else {
    auto& hold = holds_.at(reference.ids().fork);
    if (hold.state == Hold::State::lost) return hold.failure;
    ++hold.passing;
    child.via = reference.ids().fork;
  }
  ++last_.fork;
  passing_.children.emplace(fork, std::move(child));
  return ReferenceRecord{reference.owner(),    reference.object(),   fork, self_,
                         receiver.incarnation, reference.type_hint()};
}

void References::take_back(std::span<const ForkId> forks) {
  Transaction transaction(*this);
  for (const auto& fork : forks) drop_child(transaction, fork, false);
}

void References::ended(std::span<const ForkId> forks, bool failed) {
  Transaction transaction(*this);
  for (const auto& fork : forks) {
    const auto child = passing_.children.find(fork);
    if (child == passing_.children.end()) continue;
    child->second.askable = true;
    // After a failed call the receiver may not have the reference, so ask_now() does not wait a round.
    child->second.ripe = failed;
  }
  if (failed) {
    transaction.later([weak = weak_from_this()] {
      if (const auto references = weak.lock()) references->ask_now();
    });
  }
  ask_later(transaction);
}

void References::replied(std::span<const ForkId> forks, std::uint64_t call) {
  Transaction transaction(*this);
  for (const auto& fork : forks) {
    const auto child = passing_.children.find(fork);
    if (child == passing_.children.end()) continue;
    child->second.call = call;
    child->second.askable = call != 0;  // without its call's number the caller cannot answer the question
  }
  ask_later(transaction);
}

Status References::judge(const ReferenceRecord& record, const AgentId& sender) const {
  if (closed_) return {Code::agent_closed, formatted("agent {} was shut down", self_.name)};
  if (record.receiver != self_.incarnation) {
    return Status(
        Code::protocol_error,
        formatted("a reference from {} was meant for another agent than {}, or for an earlier incarnation of it",
                  sender.name, self_.name));
  }
  if (record.parent != sender || record.fork.incarnation != sender.incarnation) {
    return Status(Code::protocol_error, formatted("a reference from {} was passed on by another agent", sender.name));
  }
  if (sender.incarnation == self_.incarnation) {  // a peer may have put this agent's incarnation into the record
    const auto child = passing_.children.find(record.fork);
    if (child == passing_.children.end() || child->second.receiver != self_ || child->second.object != record.object) {
      return Status(Code::protocol_error,
                    formatted("a reference arrived at {} from itself, but was never sent", self_.name));
    }
  }
  if (!proves(record.object, record.fork, self_.incarnation)) {
    return Status(Code::permission_denied,
                  formatted("a reference to the object {}:{} from {} was not made for {}", record.object.incarnation,
                            record.object.counter, sender.name, self_.name));
  }
  const auto parent = peers_.find(sender.incarnation);
  if (parent != peers_.end() && parent->second.refused.contains(record.fork)) {
    return Status(Code::cancelled,
                  formatted("a reference from {} arrived after its call had failed there", sender.name));
  }
  return {};
}

Result<std::shared_ptr<Reference>> References::receive(const ReferenceRecord& record, const AgentId& sender) {
  Transaction transaction(*this);
  if (auto judged = judge(record, sender); !judged.ok()) return judged;
  auto accept = ReferenceOp::of(ReferenceOp::Kind::accept, record.fork);

  if (record.owner.incarnation == self_.incarnation) {
    const auto object = find_or_await(record.object, &sender);
    post(transaction, sender, std::move(accept));
    if (object == objects_.end()) return Status(Code::not_found, why_gone(record.object));
    ++object->second.locals;
    return local_handle(record.object, record.type_hint);
  }

  const auto handle = [&] {
    return std::shared_ptr<Reference>(
        new Reference(shared_from_this(), record.owner, Creation{record.object, record.fork}, record.type_hint, false));
  };
  // The message comes again if the sender's connection was lost: a call that is idempotent.
  if (past_.holds.contains(record.fork)) {
    return Status(
        Code::cancelled,
        formatted("a call from {} was sent again, and its reference was dropped here in between", sender.name));
  }
  const auto [at, is_new] = holds_.try_emplace(record.fork);
  auto& hold = at->second;
  if (!is_new) {
    if (hold.parent != sender || hold.owner != record.owner || hold.object != record.object)
      return Status(Code::protocol_error, formatted("a reference from {} arrived as two different ones", sender.name));
    ++hold.handles;
    return handle();
  }
  hold.state = Hold::State::unconfirmed;
  hold.owner = record.owner;
  hold.object = record.object;
  hold.parent = record.parent;
  if (past_.deceased.contains(record.owner.incarnation)) {
    lose(transaction, hold, gone(record.owner));
    post(transaction, sender, std::move(accept));
  } else if (record.owner.incarnation == sender.incarnation) {
    confirm(transaction, hold);  // the owner made the fork itself
    post(transaction, sender, std::move(accept));
  } else {
    auto fork = ReferenceOp::of(ReferenceOp::Kind::fork, record.fork, record.object);
    fork.parent = record.parent;
    post(transaction, record.owner, std::move(fork));
  }
  return handle();
}

void References::confirm(Transaction& transaction, Hold& hold) {
  hold.state = Hold::State::confirmed;
  for (auto& waiter : std::exchange(hold.waiters, {})) {
    transaction.later([completion = std::move(waiter)] { completion({}); });
  }
}

void References::lose(Transaction& transaction, Hold& hold, Status why) {
  hold.state = Hold::State::lost;
  hold.failure = std::move(why);
  for (auto& waiter : std::exchange(hold.waiters, {})) {
    transaction.later([completion = std::move(waiter), why = hold.failure] { completion(why); });
  }
}

void References::drop(const Reference& reference) {
  Transaction transaction(*this);
  if (reference.is_owner()) {
    const auto object = objects_.find(reference.object());
    if (object == objects_.end()) return;  // close() has run
    --object->second.locals;
    return free_if_unused(transaction, object);
  }
  const auto hold = holds_.find(reference.ids().fork);
  if (hold == holds_.end()) return;
  --hold->second.handles;
  release_if_done(transaction, hold);
}

/// Ends a hold without handles, and tells the owner. Does nothing while the owner does not know of the hold, or while a
/// fork that was made of it is on its way.
void References::release_if_done(Transaction& transaction, Holds::iterator at) {
  auto& hold = at->second;
  if (hold.passing != 0) return;
  if (hold.abandon) {
    hold.abandon = false;
    auto abandon = ReferenceOp::of(ReferenceOp::Kind::abandon, at->first, hold.object);
    abandon.text = hold.failure.what();
    post(transaction, hold.owner, std::move(abandon));
  }
  if (hold.handles != 0) return;
  if (hold.state == Hold::State::creating || hold.state == Hold::State::unconfirmed) return;
  if (hold.state == Hold::State::confirmed) {
    post(transaction, hold.owner, ReferenceOp::of(ReferenceOp::Kind::remove, at->first, hold.object));
    if (hold.parent == hold.owner) past_.holds.insert(at->first);
  }
  holds_.erase(at);
}

/// Ends the transfer of a fork that this agent made: its receiver has accepted it, or will never have it.
void References::drop_child(Transaction& transaction, const ForkId& fork, bool accepted) {
  const auto at = passing_.children.find(fork);
  if (at == passing_.children.end()) return;
  const auto child = std::move(at->second);
  passing_.children.erase(at);
  if (child.via != ForkId{}) {
    const auto hold = holds_.find(child.via);
    if (hold == holds_.end()) return;
    --hold->second.passing;
    return release_if_done(transaction, hold);
  }
  // This agent owns the object, and the fork kept it alive. If the receiver is this agent too, it has a local hold.
  if (accepted && child.receiver.incarnation != self_.incarnation) return;
  const auto object = objects_.find(child.object);
  if (object == objects_.end()) return;
  drop_fork(object->second, fork);
  free_if_unused(transaction, object);
}

void References::ask_later(Transaction& transaction) {
  if (passing_.asking || closed_) return;
  passing_.asking = true;
  transaction.later([network = network_, weak = weak_from_this(), delay = options_.ask_after] {
    network->after(delay, [weak] {
      const auto references = weak.lock();
      if (!references) return;
      {
        const std::lock_guard lock(references->mutex_);
        references->passing_.asking = false;
      }
      references->ask_now();
    });
  });
}

/// Asks the receivers of all forks that were sent a while ago and have not been accepted.
void References::ask_now() {
  Transaction transaction(*this);
  bool more = false;
  for (auto& [fork, child] : passing_.children) {
    if (!child.askable || child.held) continue;
    more = true;
    if (child.ripe && !child.asked) {
      child.asked = true;
      auto withdraw = ReferenceOp::of(ReferenceOp::Kind::withdraw, fork);
      withdraw.call = child.call;
      post(transaction, child.receiver, std::move(withdraw));
    }
    child.ripe = true;
  }
  if (more) ask_later(transaction);
}

bool References::confirmed(const Reference& reference) const {
  const std::lock_guard lock(mutex_);
  if (closed_ || reference.is_owner()) return !closed_;
  const auto hold = holds_.find(reference.ids().fork);
  return hold != holds_.end() && hold->second.state == Hold::State::confirmed;
}

Status References::status(const Reference& reference) const {
  const std::lock_guard lock(mutex_);
  if (closed_) return {Code::agent_closed, formatted("agent {} was shut down", self_.name)};
  if (reference.is_owner()) return {};
  const auto hold = holds_.find(reference.ids().fork);
  return hold != holds_.end() ? hold->second.failure : Status();
}

void References::on_confirmed(const Reference& reference, UniqueFunction<void(Status)> completion) {
  Transaction transaction(*this);
  Status now;
  if (closed_) {
    now = {Code::agent_closed, formatted("agent {} was shut down", self_.name)};
  } else if (!reference.is_owner()) {
    auto& hold = holds_.at(reference.ids().fork);
    if (hold.state == Hold::State::creating || hold.state == Hold::State::unconfirmed) {
      return hold.waiters.push_back(std::move(completion));
    }
    now = hold.failure;
  }
  transaction.later([completion = std::move(completion), now] { completion(now); });
}

}  // namespace tensorferry
