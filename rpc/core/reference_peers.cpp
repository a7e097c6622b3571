// The exchange between the reference tables of two agents: numbered batches, one at a time, and their operations.
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "rpc/core/reference_transaction.h"
#include "rpc/core/references.h"

namespace tensorferry {

using references::Child;
using references::Hold;
using references::OwnedObject;
using references::Peer;
using OpKind = ReferenceOp::Kind;
using ResultCode = ReferenceResult::Code;

Peer& References::peer_of(const AgentId& id) {
  auto& peer = peers_[id.incarnation];
  peer.id = id;
  return peer;
}

// ---- sending

void References::post(Transaction& transaction, const AgentId& to, ReferenceOp op) {
  if (closed_ || past_.deceased.contains(to.incarnation)) return;
  if (to.incarnation == self_.incarnation) return to_self_.push_back(std::move(op));
  peer_of(to).queue.push_back(std::move(op));
  transaction.touch(to.incarnation);
}

void References::deliver(Transaction& transaction) {
  while (!to_self_.empty()) {
    const auto op = std::move(to_self_.front());
    to_self_.pop_front();
    apply_result(transaction, self_, op, apply(transaction, self_, op));
  }
  for (const auto incarnation : transaction.touched_) {
    const auto peer = peers_.find(incarnation);
    if (peer != peers_.end() && peer->second.batch.empty()) send_batch(transaction, peer->second);
  }
}

/// Sends the batch under way again. If there is none, makes one of the queued operations and sends it.
void References::send_batch(Transaction& transaction, Peer& peer) {
  if (peer.batch.empty()) {
    if (peer.queue.empty()) return;
    const auto ops = std::min(peer.queue.size(), ReferenceBatch::most_ops);
    const auto end = peer.queue.begin() + static_cast<std::ptrdiff_t>(ops);
    peer.batch.assign(std::make_move_iterator(peer.queue.begin()), std::make_move_iterator(end));
    peer.queue.erase(peer.queue.begin(), end);
    ++peer.batch_number;
    peer.delay_ms = 0;
  }
  const auto number = peer.batch_number;
  transaction.later([network = network_, weak = weak_from_this(), to = peer.id, number,
                     bytes = encode(ReferenceBatch{peer.id.incarnation, number, peer.batch})]() mutable {
    network->send(to, std::move(bytes), [weak, to, number](const Result<Bytes>& answer) {
      if (const auto references = weak.lock()) references->answered(to, number, answer);
    });
  });
}

void References::answered(const AgentId& from, std::uint64_t number, const Result<Bytes>& bytes) {
  Transaction transaction(*this);
  const auto at = peers_.find(from.incarnation);
  if (at == peers_.end()) return;
  auto& peer = at->second;
  if (peer.batch_number != number || peer.batch.empty()) return;  // the answer to a repeat came first

  if (!bytes.ok()) {
    peer.delay_ms = std::clamp<std::int64_t>(peer.delay_ms * 2, options_.retry.count(), options_.most_retry.count());
    // No link reports the death of a peer that died before it had a link to this agent.
    const auto code = bytes.status().code();
    const bool missing = code == Code::not_found || code == Code::connection_lost;
    peer.missing_ms = missing ? peer.missing_ms + peer.delay_ms : 0;
    if (peer.missing_ms > options_.give_up.count()) return lose_peer(transaction, from, bytes.status());
    return transaction.later([network = network_, weak = weak_from_this(), from, number, delay = peer.delay_ms] {
      network->after(Milliseconds(delay), [weak, from, number] {
        if (const auto references = weak.lock()) references->send_again(from, number);
      });
    });
  }
  const auto answer = decode<ReferenceAnswer>(*bytes);
  if (!answer || answer->kind != ReferenceAnswer::Kind::done || answer->results.size() != peer.batch.size()) {
    return lose_peer(transaction, from, {Code::connection_lost, formatted("{} has another incarnation", from.name)});
  }
  peer.missing_ms = 0;
  const auto ops = std::exchange(peer.batch, {});
  for (std::size_t i = 0; i < ops.size(); ++i) apply_result(transaction, from, ops[i], answer->results[i]);
  transaction.touch(from.incarnation);
}

void References::send_again(const AgentId& to, std::uint64_t number) {
  Transaction transaction(*this);
  const auto peer = peers_.find(to.incarnation);
  if (closed_ || peer == peers_.end()) return;
  if (peer->second.batch_number == number && !peer->second.batch.empty()) send_batch(transaction, peer->second);
}

void References::apply_result(Transaction& transaction, const AgentId& from, const ReferenceOp& op,
                              const ReferenceResult& result) {
  if (op.kind == OpKind::fork) {
    const auto at = holds_.find(op.fork);
    if (at == holds_.end() || at->second.state != Hold::State::unconfirmed) return;
    auto& hold = at->second;
    if (result.code == ResultCode::done) {
      confirm(transaction, hold);
    } else {
      const bool denied = result.code == ResultCode::denied;
      lose(transaction, hold, {denied ? Code::permission_denied : Code::not_found, result.text});
    }
    post(transaction, hold.parent, ReferenceOp::of(OpKind::accept, op.fork));
    return release_if_done(transaction, at);
  }
  if (op.kind == OpKind::withdraw) {
    const auto at = passing_.children.find(op.fork);
    if (at == passing_.children.end() || at->second.receiver.incarnation != from.incarnation) return;
    at->second.asked = false;
    if (result.code == ResultCode::held) at->second.held = true;
    if (result.code == ResultCode::refused) drop_child(transaction, op.fork, false);
  }
}

// ---- receiving

Result<Bytes> References::receive_mail(const AgentId& from, ByteView message) {
  const auto batch = decode<ReferenceBatch>(message);
  if (!batch) return Status(Code::protocol_error, formatted("{} sent an invalid reference message", from.name));
  const auto refuse = [](ReferenceAnswer::Kind kind) { return encode(ReferenceAnswer{kind, {}}); };
  if (batch->receiver != self_.incarnation) return refuse(ReferenceAnswer::Kind::stranger);

  Transaction transaction(*this);
  if (closed_) return Status(Code::agent_closed, formatted("agent {} was shut down", self_.name));
  if (past_.deceased.contains(from.incarnation)) return refuse(ReferenceAnswer::Kind::dead);
  auto& peer = peer_of(from);
  if (batch->number != 0 && batch->number == peer.done) return peer.answer;  // a repeat: the first answer was lost
  if (batch->number != peer.done + 1) return refuse(ReferenceAnswer::Kind::stale);
  ReferenceAnswer answer;
  for (const auto& op : batch->ops) answer.results.push_back(apply(transaction, from, op));
  peer.done = batch->number;
  peer.answer = encode(answer);
  return peer.answer;
}

ReferenceResult References::apply(Transaction& transaction, const AgentId& from, const ReferenceOp& op) {
  switch (op.kind) {
    case OpKind::fork:
      return apply_fork(transaction, from, op);
    case OpKind::withdraw:
      return apply_withdraw(from, op);
    case OpKind::abandon:
      apply_abandon(transaction, from, op);
      break;
    case OpKind::accept: {
      const auto child = passing_.children.find(op.fork);
      if (child != passing_.children.end() && child->second.receiver.incarnation == from.incarnation) {
        drop_child(transaction, op.fork, true);
      }
      break;
    }
    case OpKind::remove: {
      const auto object = objects_.find(op.object);
      if (object == objects_.end()) break;
      const auto fork = object->second.forks.find(op.fork);
      if (fork == object->second.forks.end() || fork->second != from.incarnation) break;
      drop_fork(object->second, op.fork);
      free_if_unused(transaction, object);
      break;
    }
    case OpKind::ping:
      break;
  }
  return {};
}

ReferenceResult References::apply_fork(Transaction& transaction, const AgentId& from, const ReferenceOp& op) {
  if (const auto may = may_use(from, op.object, op.fork); !may.ok()) {
    return {ResultCode::denied, std::string(may.what())};
  }
  const auto object = find_or_await(op.object, &from);
  if (object == objects_.end()) return {ResultCode::gone, why_gone(op.object)};
  if (const auto status = add_fork(object->second, op.fork, from); !status.ok()) {
    free_if_unused(transaction, object);
    return {ResultCode::denied, std::string(status.what())};
  }
  // If the parent died before it had a link to this agent, no link reports that, and the object would be awaited for
  // ever. An unanswered ping shows it.
  if (object->second.state == OwnedObject::State::awaited && !peers_.contains(op.parent.incarnation)) {
    post(transaction, op.parent, ReferenceOp::of(OpKind::ping));
  }
  return {};
}

ReferenceResult References::apply_withdraw(const AgentId& from, const ReferenceOp& op) {
  if (op.fork.incarnation != from.incarnation) return {ResultCode::held, {}};  // `from` did not make this fork
  if (holds_.contains(op.fork)) return {ResultCode::held, {}};
  // Pairs with end_call(): if the group is empty, that call's reply has been decoded, or will never be.
  if (op.call != 0 && calls_.may_be(op.call)) return {ResultCode::maybe, {}};
  peer_of(from).refused.insert(op.fork);
  return {ResultCode::refused, {}};
}

void References::apply_abandon(Transaction& transaction, const AgentId& from, const ReferenceOp& op) {
  if (op.object.incarnation != from.incarnation || from.incarnation == self_.incarnation) return;
  peer_of(from).created.insert(op.object.counter);
  const auto object = objects_.find(op.object);
  if (object == objects_.end()) return;
  const auto fork = object->second.forks.find(op.fork);
  const bool held = fork != object->second.forks.end() && fork->second == from.incarnation;
  if (held) drop_fork(object->second, op.fork);
  const Status why(Code::cancelled, formatted("{} cancelled the creation of this object: {}", from.name, op.text));
  if (object->second.state == OwnedObject::State::awaited) return finish(transaction, object, why);
  if (held && object->second.state == OwnedObject::State::running) give_up(transaction, object->second, op.fork, why);
  free_if_unused(transaction, object);
}

// ---- the end of a peer

void References::peer_lost(const AgentId& peer, const Status& why) {
  Transaction transaction(*this);
  if (!closed_) lose_peer(transaction, peer, why);
}

void References::lose_peer(Transaction& transaction, const AgentId& peer, const Status& why) {
  if (peer.incarnation == self_.incarnation || past_.deceased.contains(peer.incarnation)) return;
  past_.deceased.insert(peer.incarnation);
  peers_.erase(peer.incarnation);

  std::vector<RRefId> touched;
  for (auto& [id, object] : objects_) {
    const auto dropped = std::erase_if(object.forks, [&](const auto& fork) { return fork.second == peer.incarnation; });
    const bool orphaned = id.incarnation == peer.incarnation && object.state == OwnedObject::State::awaited;
    if (dropped != 0 || orphaned) touched.push_back(id);
  }
  for (const auto& id : touched) {
    const auto object = objects_.find(id);
    if (id.incarnation == peer.incarnation && object->second.state == OwnedObject::State::awaited) {
      finish(transaction, object,
             Status(Code::connection_lost, formatted("{}, which was creating this object, is gone", peer.name)));
    } else {
      free_if_unused(transaction, object);
    }
  }

  std::vector<ForkId> children;
  for (const auto& [fork, child] : passing_.children) {
    if (child.receiver.incarnation == peer.incarnation) children.push_back(fork);
  }
  std::vector<ForkId> holds;
  for (auto& [fork, hold] : holds_) {
    if (hold.owner.incarnation == peer.incarnation) holds.push_back(fork);
  }
  for (const auto& fork : holds) {
    const auto hold = holds_.find(fork);
    const bool unconfirmed = hold->second.state == Hold::State::unconfirmed;
    hold->second.abandon = false;
    lose(transaction, hold->second,
         {Code::connection_lost,
          formatted("{}, which owned the object of this reference, is gone: {}", peer.name, why.what())});
    if (unconfirmed) post(transaction, hold->second.parent, ReferenceOp::of(OpKind::accept, fork));
    release_if_done(transaction, hold);
  }
  for (const auto& fork : children) drop_child(transaction, fork, false);
}

}  // namespace tensorferry
