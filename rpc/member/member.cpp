#include "rpc/member/member.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "rpc/core/agent_network.h"
#include "rpc/member/patience.h"

namespace tensorferry {
namespace {

// Long enough for a peer that is joining right now, short enough that a caller soon learns of a wrong name.
constexpr Milliseconds lookup_patience{2000};

}  // namespace

Member::Member(std::shared_ptr<RawAgent> agent, std::shared_ptr<Store> store, std::string prefix, int world_size,
               RuntimeLock* lock, const References::Options& reference_options)
    : agent_(std::move(agent)),
      store_(std::move(store)),
      prefix_(std::move(prefix)),
      world_size_(world_size),
      lock_(lock),
      references_(References::make({self().name, self().incarnation}, std::make_shared<AgentNetwork>(*agent_),
                                   reference_options)) {}

Member::~Member() { end(); }

Result<std::shared_ptr<Member>> Member::create(RawAgentOptions options, int world_size, RuntimeLock* lock) {
  const Unlocked unlocked(lock);
  auto store = options.store;
  auto prefix = options.prefix;
  References::Options reference_options;
  reference_options.give_up = options.peer_timeout;
  auto agent = RawAgent::create(std::move(options));
  if (!agent.ok()) return agent.status();
  const std::shared_ptr<Member> member(
      new Member(*std::move(agent), std::move(store), std::move(prefix), world_size, lock, reference_options));
  serve_references(*member->agent_, member->references_);
  member->agent_->on_peer_lost([weak = member->weak_from_this()](const PeerInfo& peer, const Status& why) {
    const auto self = weak.lock();
    if (!self) return;
    ++self->peers_lost_;
    self->references_->peer_lost({peer.name, peer.incarnation}, why);
    if (self->world_size_ == 0) return;
    const std::lock_guard guard(self->lost_mutex_);
    self->lost_.emplace(peer.incarnation, why.what());
  });
  return member;
}

Status Member::announce() {
  const Unlocked unlocked(lock_);
  return agent_->announce();
}

Status Member::wait_for_world(Milliseconds timeout) {
  if (world_size_ == 0) return {};
  const Unlocked unlocked(lock_);
  const Patience patience(timeout);
  for (;;) {
    auto world = agent_->wait_for_world(world_size_, std::max(patience.slice(), Milliseconds(1)));
    if (world.ok()) {
      world_ = *std::move(world);
      return {};
    }
    if (world.status().code() != Code::deadline_exceeded) return world.status();
    if (unlocked.interrupted())
      return {Code::cancelled, formatted("interrupted while waiting for a world of {} to join", world_size_)};
    if (patience.over()) {
      return {Code::deadline_exceeded,
              formatted("after {} s {}",
                        fixed(std::chrono::duration<double>(timeout).count(), timeout.count() % 1000 == 0 ? 0 : 1),
                        world.status().what())};
    }
  }
}

void Member::end() {
  if (!agent_->usable_here().ok()) return;
  const std::lock_guard lock(leaving_);
  references_->close();
  agent_->leave();
}

void Member::leave() {
  const Unlocked unlocked(lock_);
  end();
}

Result<PeerInfo> Member::find(std::string_view name) const {
  const Unlocked unlocked(lock_);
  return agent_->find(name, lookup_patience);
}

Result<PeerInfo> Member::find(int rank) const {
  const Unlocked unlocked(lock_);
  return agent_->find(rank, lookup_patience);
}

Result<AgentId> Member::id_of(std::string_view peer) const {
  if (peer == self().name) return AgentId{self().name, self().incarnation};
  // An earlier look-up cannot be reused: without a link, this agent does not learn that the peer has ended.
  if (const auto linked = agent_->linked(peer)) return AgentId{linked->name, linked->incarnation};
  const auto found = find(peer);
  if (!found.ok()) return found.status();
  return AgentId{found->name, found->incarnation};
}

Member::InFlight Member::in_flight() const {
  const auto [made, served] = agent_->in_flight();
  return {made, served, unread.load(), !references_->settled()};
}

}  // namespace tensorferry
