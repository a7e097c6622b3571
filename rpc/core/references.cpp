#include "rpc/core/references.h"

#include "agent/transport/cluster_key.h"
#include "base/text.h"
#include "rpc/core/reference_proof.h"
#include "rpc/core/reference_transaction.h"

namespace tensorferry {
namespace {

References::Options with_secret(References::Options options) {
  if (options.secret == decltype(options.secret){}) fill_random(std::as_writable_bytes(std::span(options.secret)));
  return options;
}

}  // namespace

// ---- Reference

Reference::~Reference() {
  if (!references_->inherited()) references_->drop(*this);
}
bool Reference::confirmed() const { return references_->confirmed(*this); }
Status Reference::status() const { return references_->status(*this); }
void Reference::on_confirmed(UniqueFunction<void(Status)> completion) const {
  references_->on_confirmed(*this, std::move(completion));
}

// ---- ReferenceTransfer

ReferenceTransfer& ReferenceTransfer::operator=(ReferenceTransfer&& other) noexcept {
  if (this == &other) return *this;
  finish();
  references_ = std::move(other.references_);
  receiver_ = std::move(other.receiver_);
  forks_ = std::move(other.forks_);
  other.forks_.clear();
  sent_ = other.sent_;
  return *this;
}

ReferenceTransfer::~ReferenceTransfer() { finish(); }

bool ReferenceTransfer::must_report() const { return !forks_.empty() && !references_->inherited(); }

void ReferenceTransfer::finish() {
  if (must_report() && sent_) references_->ended(forks_, true);
  if (must_report() && !sent_) references_->take_back(forks_);
  forks_.clear();
}

Result<ReferenceRecord> ReferenceTransfer::add(const Reference& reference) {
  if (!references_) return Status(Code::invalid_argument, "a reference cannot be sent here: the receiver is not known");
  auto record = references_->pass(reference, receiver_);
  if (record.ok()) forks_.push_back(record->fork);
  return record;
}

void ReferenceTransfer::ended(const Status& status) {
  if (must_report()) references_->ended(forks_, !status.ok());
  forks_.clear();
}

void ReferenceTransfer::replied(std::uint64_t call) {
  if (must_report()) references_->replied(forks_, call);
  forks_.clear();
}

// ---- References

References::References(AgentId self, std::shared_ptr<Network> network, Options options)
    : self_(std::move(self)), network_(std::move(network)), options_(with_secret(options)) {}

std::shared_ptr<References> References::make(AgentId self, std::shared_ptr<Network> network, Options options) {
  return std::shared_ptr<References>(new References(std::move(self), std::move(network), options));
}

References::~References() = default;

std::uint64_t References::nonce_of(std::uint64_t owner, std::uint64_t object) const {
  return siphash(options_.secret[0], options_.secret[1], std::array{owner, object});
}

ReferenceTransfer References::pass_to(AgentId receiver) { return {shared_from_this(), std::move(receiver)}; }

std::uint64_t References::begin_call() { return calls_.begin(); }

void References::end_call(std::uint64_t call) {
  // Release: apply_withdraw(), if it finds the group empty, sees the holds that receive() made for the reply.
  calls_.end(call);
}

References::Counts References::counts() const {
  const std::lock_guard lock(mutex_);
  Counts counts;
  counts.passing = passing_.children.size();
  for (const auto& [id, object] : objects_) {
    counts.objects += object.state != references::OwnedObject::State::awaited;
    counts.forks += object.forks.size();
  }
  for (const auto& [fork, hold] : holds_) {
    if (hold.handles != 0) ++counts.holds[hold.owner.name];
  }
  return counts;
}

bool References::settled() const {
  using State = references::Hold::State;
  const std::lock_guard lock(mutex_);
  if (!passing_.children.empty() || !to_self_.empty()) return false;
  for (const auto& [incarnation, peer] : peers_) {
    if (!peer.queue.empty() || !peer.batch.empty()) return false;
  }
  for (const auto& [fork, hold] : holds_) {
    if (hold.state == State::creating || hold.state == State::unconfirmed) return false;
  }
  return true;
}

void References::close() {
  // Declared before the lock, so that values are dropped after the lock is released.
  Objects objects;
  Holds holds;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    objects.swap(objects_);
    holds.swap(holds_);
    passing_.children.clear();
    peers_.clear();
    to_self_.clear();
  }
  const Status closed(Code::agent_closed, formatted("agent {} was shut down", self_.name));
  for (auto& [id, object] : objects) {
    for (auto& waiter : object.waiters) waiter.completion(closed);
  }
  for (auto& [fork, hold] : holds) {
    for (auto& waiter : hold.waiters) waiter(closed);
  }
}

}  // namespace tensorferry
