// Member::finish: the waiting part of a graceful shutdown.

#include <thread>
#include <utility>

#include "base/text.h"
#include "rpc/member/member.h"
#include "rpc/member/patience.h"

namespace tensorferry {
namespace {

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
  for (auto pause = std::chrono::microseconds(200);; pause = std::min(2 * pause, std::chrono::microseconds(10000))) {
    const auto now = in_flight();
    if (!now.any()) return {};
    if (patience.over()) {
      return {Code::deadline_exceeded,
              formatted("{} calls made and {} served here are still under way", now.made, now.served)};
    }
    if (unlocked.interrupted()) return interruption();
    std::this_thread::sleep_for(pause);
  }
}

// Returns why `peer` will not come to this shutdown; nullopt: it still may.
std::optional<std::string> Member::why_gone(const PeerInfo& peer) const {
  const auto found = agent_->find(peer.name, {});
  if (found.status().code() == Code::not_found) return "it has left";
  if (found.ok() && found->incarnation != peer.incarnation) return "it was started anew";
  if (const auto linked = agent_->linked(peer.name); linked && linked->incarnation == peer.incarnation) return {};
  const std::lock_guard lock(lost_mutex_);
  const auto lost = lost_.find(peer.incarnation);
  return lost == lost_.end() ? std::nullopt : std::optional(lost->second);
}

Status Member::wait_for_all(const std::string& key, const Patience& patience, const Unlocked& unlocked) const {
  const auto came = [&](const std::string& name) { return is_set(*store_, key + "/at/" + name, {}); };
  if (auto set = store_->set(key + "/at/" + self().name, {}); !set.ok()) return set;
  const auto arrived = store_->add(key + "/arrived", 1);
  if (!arrived.ok()) return arrived.status();
  if (*arrived == world_size_) {
    if (auto set = store_->set(key + "/go", {}); !set.ok()) return set;
  }
  for (;;) {
    const auto go = is_set(*store_, key + "/go", patience.slice());
    if (!go.ok()) return go.status();
    if (*go) return {};
    if (unlocked.interrupted()) return interruption();
    std::string missing;
    for (const auto& peer : world_) {
      auto here = came(peer.name);
      if (here.ok() && *here) continue;
      const auto why = why_gone(peer);
      // Asks again: the peer may have arrived and left since.
      if (why) here = came(peer.name);
      if (!here.ok()) return here.status();
      if (*here) continue;
      if (why) {
        return {Code::connection_lost,
                formatted("\"{}\" was lost before it reached the shutdown ({})", peer.name, *why)};
      }
      missing += (missing.empty() ? "" : ", ") + peer.name;
    }
    if (patience.over()) {
      return {Code::deadline_exceeded, "still waiting for " + (missing.empty() ? "the store" : missing)};
    }
  }
}

// Detects termination by rounds. In each round, an agent waits until it is idle, marks the round busy if it has made or
// served a call since its last round, and waits for all other agents to arrive. If no agent marks the round busy, all
// agents were idle at one moment between this round and the last. No call was in flight then, so none can begin.
Status Member::finish_world(const Patience& patience, const Unlocked& unlocked) const {
  const auto base = prefix_ + "/shutdown/";
  std::optional<std::pair<std::uint64_t, std::uint64_t>> before;
  for (int number = 0;; ++number) {
    if (auto idle = wait_until_idle(patience, unlocked); !idle.ok()) return idle;
    const auto counters = agent_->counters();
    const std::pair now(counters.calls_sent, counters.calls_served);
    const auto key = base + std::to_string(number);
    if (before != now) {
      if (const auto marked = store_->add(key + "/busy", 1); !marked.ok()) return marked.status();
    }
    before = now;
    if (auto all = wait_for_all(key, patience, unlocked); !all.ok()) return all;
    const auto busy = store_->add(key + "/busy", 0);
    if (!busy.ok()) return busy.status();
    if (*busy == 0) break;
  }
  // Rank 0 may serve the store, which the other agents still read: it waits up to 5 s for them.
  auto done = store_->add(base + "done", 1);
  const auto until = Clock::now() + std::chrono::seconds(5);
  while (self().rank == 0 && done.ok() && *done < world_size_ && Clock::now() < until) {
    if (unlocked.interrupted()) return interruption();
    std::this_thread::sleep_for(Milliseconds(1));
    done = store_->add(base + "done", 0);
  }
  // All agents agreed to leave, so rank 0 may have left, and the store with it.
  return done.ok() || done.status().code() == Code::connection_lost ? Status() : done.status();
}

Status Member::finish(Milliseconds timeout) {
  const Patience patience(timeout);
  const Unlocked unlocked(lock_);
  auto finished = world_size_ == 0 ? wait_until_idle(patience, unlocked) : finish_world(patience, unlocked);
  if (finished.ok() || finished.code() == Code::cancelled) return finished;
  return {finished.code(), formatted("shutdown: {}; \"{}\" has left", finished.what(), self().name)};
}

}  // namespace tensorferry
