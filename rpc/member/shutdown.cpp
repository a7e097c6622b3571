// Member::finish: the waiting part of a graceful shutdown.

#include <thread>
#include <utility>

#include "base/text.h"
#include "rpc/member/member.h"
#include "rpc/member/patience.h"

namespace tensorferry {
namespace {

// How often the agents that wait look whether another one will not come.
constexpr Milliseconds look_interval{500};

Status interruption() {
  return {Code::cancelled,
          "interrupted while waiting for the calls of all agents to end, and for all agents to shut down"};
}

Result<bool> is_set(Store& store, const std::string& key, Milliseconds timeout) {
  const auto value = store.get(key, timeout);
  if (value.ok()) return true;
  if (value.status().code() == Code::deadline_exceeded) return false;
  return value.status();
}

}  // namespace

Status Member::wait_until_idle(const Patience& patience, const Unlocked& unlocked) const {
  for (auto pause = std::chrono::microseconds(200);; pause = std::min(2 * pause, std::chrono::microseconds(50000))) {
    const auto now = in_flight();
    if (!now.any()) return {};
    if (patience.over()) {
      return {Code::deadline_exceeded,
              formatted("{} calls made and {} served here are still under way", now.made, now.served)};
    }
    if (unlocked.interrupted()) return interruption();
    agent_->clock().sleep_for(pause);
  }
}

bool Member::was_lost(const PeerInfo& peer) const {
  const std::lock_guard lock(lost_mutex_);
  return lost_.contains(peer.incarnation);
}

// Returns why `peer` will not come to this shutdown; nullopt: it still may.
std::optional<std::string> Member::why_gone(const PeerInfo& peer) const {
  const auto found = agent_->find(peer.name, {});
  if (found.status().code() == Code::not_found) return "it has left";
  if (found.ok() && found->incarnation != peer.incarnation) return "it was started anew";
  if (const auto linked = agent_->linked(peer.name); linked && linked->incarnation == peer.incarnation) return {};
  {
    const std::lock_guard lock(lost_mutex_);
    if (const auto lost = lost_.find(peer.incarnation); lost != lost_.end()) return lost->second;
  }
  // No link reports the death of an agent that died before it had a link to this one.
  if (agent_->has_ended(peer)) return "its process has ended";
  return std::nullopt;
}

// Looks for the agents that have not arrived: among all agents of the world, or among those that were lost.
Result<Member::Absent> Member::look_for_absent(const std::string& key, bool among_all) const {
  const auto came = [&](const PeerInfo& peer) { return is_set(*store_, key + "/at/" + peer.name, {}); };
  Absent absent;
  for (const auto& peer : world_) {
    if (!among_all && !was_lost(peer)) continue;
    auto here = came(peer);
    if (here.ok() && *here) continue;
    const auto why = why_gone(peer);
    // Asks again: the peer may have arrived and left since.
    if (why) here = came(peer);
    if (!here.ok()) return here.status();
    if (*here) continue;
    if (why) {
      absent.lost = formatted("\"{}\" was lost before it reached the shutdown ({})", peer.name, *why);
      return absent;
    }
    absent.missing += (absent.missing.empty() ? "" : ", ") + peer.name;
  }
  return absent;
}

// All agents wait for one key, which the last one to arrive sets, or else the first one that finds an agent lost. The
// agents that wait take turns to look at all others, so that the store has one look to serve each half second, however
// many agents there are.
Status Member::wait_for_all(const std::string& key, const Patience& patience, const Unlocked& unlocked) const {
  if (auto set = store_->set(key + "/at/" + self().name, {}); !set.ok()) return set;
  auto arrived = store_->add(key + "/arrived", 1);
  if (!arrived.ok()) return arrived.status();
  if (*arrived == world_size_) {
    if (auto set = store_->set(key + "/go", {}); !set.ok()) return set;
  }
  auto turn = agent_->clock().now() + look_interval * *arrived;
  for (;;) {
    const auto go = store_->get(key + "/go", patience.slice());
    if (go.ok()) return go->empty() ? Status() : Status(Code::connection_lost, std::string(text_of(*go)));
    if (go.status().code() != Code::deadline_exceeded) return go.status();
    if (unlocked.interrupted()) return interruption();
    const bool over = patience.over(), mine = over || agent_->clock().now() >= turn;
    const auto absent = look_for_absent(key, mine);
    if (!absent.ok()) return absent.status();
    if (!absent->lost.empty()) {
      // An agent that has left may have done so because all had arrived.
      const auto all = is_set(*store_, key + "/go", {});
      if (!all.ok()) return all.status();
      if (*all) continue;
      if (auto told = store_->set(key + "/go", view_of(absent->lost)); !told.ok()) return told;
      return {Code::connection_lost, absent->lost};
    }
    if (over) {
      return {Code::deadline_exceeded,
              "still waiting for " + (absent->missing.empty() ? "the store" : absent->missing)};
    }
    if (!mine) continue;
    arrived = store_->add(key + "/arrived", 0);
    if (!arrived.ok()) return arrived.status();
    turn = agent_->clock().now() + look_interval * std::max<std::int64_t>(*arrived, 1);
  }
}

// Detects termination by rounds. In each round, an agent waits until it is idle, marks the round busy if it has made or
// served a call since its last round, and waits for all other agents to arrive. If no agent marks the round busy, all
// agents were idle at one moment between this round and the last. No call was in flight then, so none can begin.
Status Member::finish_world(const Patience& patience, const Unlocked& unlocked) const {
  // The sum of the incarnations names this world: an earlier one under the same prefix may have died in its shutdown.
  std::uint64_t world = 0;
  for (const auto& peer : world_) world += peer.incarnation;
  const auto base = formatted("{}/shutdown/{}/", prefix_, hex(world, 16));
  std::optional<std::pair<std::uint64_t, std::uint64_t>> before;
  int rounds = 0;
  for (;; ++rounds) {
    if (auto idle = wait_until_idle(patience, unlocked); !idle.ok()) return idle;
    const auto counters = agent_->counters();
    const std::pair now(counters.calls_sent, counters.calls_served);
    const auto key = base + std::to_string(rounds);
    if (before != now) {
      if (const auto marked = store_->add(key + "/busy", 1); !marked.ok()) return marked.status();
    }
    before = now;
    if (auto all = wait_for_all(key, patience, unlocked); !all.ok()) return all;
    const auto busy = store_->add(key + "/busy", 0);
    if (!busy.ok()) return busy.status();
    if (*busy == 0) break;
  }
  for (int number = 0; number <= rounds; ++number) {
    static_cast<void>(store_->erase(formatted("{}{}/at/{}", base, number, self().name)));
  }
  auto done = store_->add(base + "done", 1);
  if (self().rank == 0) {
    if (auto waited = await_the_others(base, rounds, unlocked); !waited.ok()) return waited;
  }
  // All agents agreed to leave, so rank 0 may have left, and the store with it.
  return done.ok() || done.status().code() == Code::connection_lost ? Status() : done.status();
}

// Rank 0 may serve the store, which the other agents still read: it waits up to 5 s for them, and then deletes what all
// have read.
Status Member::await_the_others(const std::string& base, int rounds, const Unlocked& unlocked) const {
  const auto until = agent_->clock().now() + std::chrono::seconds(5);
  auto done = store_->add(base + "done", 0);
  for (Milliseconds pause(1); done.ok() && *done < world_size_; pause = std::min(2 * pause, Milliseconds(20))) {
    if (agent_->clock().now() >= until) return {};
    if (unlocked.interrupted()) return interruption();
    agent_->clock().sleep_for(pause);
    done = store_->add(base + "done", 0);
  }
  if (!done.ok()) return done.status().code() == Code::connection_lost ? Status() : done.status();
  for (int number = 0; number <= rounds; ++number) {
    for (const auto* key : {"busy", "arrived", "go"}) {
      static_cast<void>(store_->erase(formatted("{}{}/{}", base, number, key)));
    }
  }
  static_cast<void>(store_->erase(base + "done"));
  return {};
}

Status Member::finish(Milliseconds timeout) {
  const Patience patience(timeout, agent_->clock());
  const Unlocked unlocked(lock_);
  auto finished = world_size_ == 0 ? wait_until_idle(patience, unlocked) : finish_world(patience, unlocked);
  if (finished.ok() || finished.code() == Code::cancelled) return finished;
  return {finished.code(), formatted("shutdown: {}; \"{}\" has left", finished.what(), self().name)};
}

}  // namespace tensorferry
