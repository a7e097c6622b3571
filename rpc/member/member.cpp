#include "rpc/member/member.h"

#include <algorithm>
#include <thread>
#include <tuple>
#include <utility>

#include "base/log.h"
#include "base/record.h"
#include "base/text.h"
#include "rpc/core/agent_network.h"

namespace tensorferry {
namespace {

// Long enough for a peer that is joining right now, short enough that a caller soon learns of a wrong name.
constexpr Milliseconds lookup_patience{2000};
// A world that forms in less is not worth a line.
constexpr std::chrono::seconds quiet_wait{5};
constexpr Milliseconds question_interval{500};  // of a waiting agent to the store, whether a rank was refused
// For all ranks of a world to read why it cannot begin.
constexpr std::chrono::seconds readers_patience{5};

/// Why a world cannot begin: the agent `refused` found its name taken by the agent of incarnation `holder`.
struct WorldConflict {
  std::int32_t refused = 0;  // its rank
  std::string name;
  std::uint64_t holder = 0;
  std::string why;
  static constexpr std::tuple fields{&WorldConflict::refused, &WorldConflict::name, &WorldConflict::holder,
                                     &WorldConflict::why};
};

}  // namespace

Member::Member(std::shared_ptr<RawAgent> agent, std::shared_ptr<Store> store, std::string prefix, int world_size,
               RuntimeLock* lock, const References::Options& reference_options)
    : agent_(std::move(agent)),
      store_(std::move(store)),
      prefix_(std::move(prefix)),
      world_size_(world_size),
      lock_(lock),
      references_(References::make({self().name, self().incarnation}, std::make_shared<AgentNetwork>(agent_),
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
  auto announced = agent_->announce();
  if (announced.code() == Code::invalid_argument && world_size_ != 0) tell_world(announced);
  return announced;
}

// Publishes why this agent was refused, if another rank of the world has its name. An agent that was started twice,
// with one name and one rank, does not keep the world from beginning.
void Member::tell_world(const Status& refused) const {
  const auto holder = agent_->find(self().name, {});
  if (!holder.ok() || holder->rank == self().rank) return;
  const WorldConflict conflict{self().rank, self().name, holder->incarnation, std::string(refused.what())};
  if (store_->set(prefix_ + "/refused", encode(conflict)).ok()) await_readers();
}

// Returns why the world cannot begin, if one of its ranks was refused. A conflict of an earlier world in the same store
// names an agent that has left or was replaced.
std::optional<Status> Member::told_by_world() const {
  const auto bytes = store_->get(prefix_ + "/refused", {});
  const auto conflict = bytes.ok() ? decode<WorldConflict>(*bytes) : std::nullopt;
  if (!conflict) return std::nullopt;
  const auto holder = agent_->find(conflict->name, {});
  if (!holder.ok() || holder->incarnation != conflict->holder) return std::nullopt;
  await_readers();
  return Status(Code::invalid_argument,
                formatted("rank {} could not join the world: {}", conflict->refused, conflict->why));
}

// Counts this agent among those that know the conflict, and waits for the others: the store may end with this process,
// and the conflict counts only while the holder of the name is there.
void Member::await_readers() const {
  const auto key = prefix_ + "/refused/readers";
  auto readers = store_->add(key, 1);
  const auto until = agent_->clock().now() + readers_patience;
  while (readers.ok() && *readers < world_size_ && agent_->clock().now() < until) {
    agent_->clock().sleep_for(Milliseconds(5));
    readers = store_->add(key, 0);
  }
}

// Logs which ranks have not joined. Asks the store once for each rank: of a large world, rank 0 alone does so.
void Member::tell_awaited() const {
  constexpr int large_world = 64;
  constexpr std::size_t most_named = 8;
  if (world_size_ > large_world && self().rank != 0) return;
  std::vector<int> missing;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (rank != self().rank && !agent_->find(rank, {}).ok()) missing.push_back(rank);
  }
  if (missing.empty()) return;
  const auto more = missing.size() > most_named ? formatted(" and {} more", missing.size() - most_named) : "";
  const bool several = missing.size() > 1;
  missing.resize(std::min(missing.size(), most_named));
  log_warning(formatted("\"{}\" waits for rank{} {}{} of a world of {} to join", self().name, several ? "s" : "",
                        joined(missing, ", "), more, world_size_));
}

Status Member::wait_for_world(Milliseconds timeout) {
  if (world_size_ == 0) return {};
  const Unlocked unlocked(lock_);
  auto tells_at = agent_->clock().now() + quiet_wait;
  auto asks_at = agent_->clock().now();
  const auto check = [&]() -> Status {
    if (agent_->clock().now() >= tells_at) {
      tells_at = Clock::time_point::max();
      tell_awaited();
    }
    if (agent_->clock().now() >= asks_at) {
      asks_at = agent_->clock().now() + question_interval;
      if (auto refused = told_by_world()) return *refused;
    }
    if (!unlocked.interrupted()) return {};
    return {Code::cancelled, formatted("interrupted while waiting for a world of {} to join", world_size_)};
  };
  auto world = agent_->wait_for_world(world_size_, timeout.count() == 0 ? Milliseconds::max() : timeout, check);
  if (world.ok()) {
    world_ = *std::move(world);
    return {};
  }
  if (world.status().code() != Code::deadline_exceeded) return world.status();
  return {Code::deadline_exceeded,
          formatted("after {} s {}",
                    fixed(std::chrono::duration<double>(timeout).count(), timeout.count() % 1000 == 0 ? 0 : 1),
                    world.status().what())};
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
  if (auto usable = agent_->usable_here(); !usable.ok()) return usable;
  if (auto linked = agent_->linked(name)) return *std::move(linked);
  const Unlocked unlocked(lock_);
  return agent_->find(name, lookup_patience);
}

Result<PeerInfo> Member::find(int rank) const {
  if (auto usable = agent_->usable_here(); !usable.ok()) return usable;
  if (auto linked = agent_->linked(rank)) return *std::move(linked);
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
