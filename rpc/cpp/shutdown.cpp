// Graceful shutdown. It takes the same steps as Python's agents (python/tensorferry/agent.py), because C++ and Python
// agents share a world.

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "tensorferry/errors.h"

namespace tensorferry::detail {
namespace {

/// The time left of a time-out. A time-out of 0 never passes.
class Patience final {
 public:
  explicit Patience(Milliseconds timeout) {
    if (timeout.count() > 0) until_ = Clock::now() + timeout;
  }
  [[nodiscard]] bool over() const { return until_ && Clock::now() >= *until_; }
  /// Returns the time left, at most 500 ms: a waiting agent then checks for dead peers.
  [[nodiscard]] Milliseconds slice() const {
    constexpr Milliseconds most{500};
    if (!until_) return most;
    return std::clamp(std::chrono::duration_cast<Milliseconds>(*until_ - Clock::now()), Milliseconds(0), most);
  }

 private:
  std::optional<Clock::time_point> until_;
};

void wait_until_idle(AgentCore& core, const Patience& patience) {
  for (auto pause = std::chrono::microseconds(200);; pause = std::min(2 * pause, std::chrono::microseconds(10000))) {
    const auto [made, served] = core.raw().in_flight();
    if (made == 0 && served == 0 && core.tables().settled()) return;
    if (patience.over()) {
      throw DeadlineExceeded("shutdown: " + std::to_string(made) + " calls made and " + std::to_string(served) +
                             " served here are still under way");
    }
    std::this_thread::sleep_for(pause);
  }
}

bool is_set(Store& store, const std::string& key, Milliseconds timeout) { return store.get(key, timeout).ok(); }

void wait_for_all(AgentCore& core, const std::vector<PeerInfo>& world, const std::string& key,
                  const Patience& patience) {
  auto& store = *core.meeting.store;
  check(store.set(key + "/at/" + core.self().name, {}));
  if (value_or_throw(store.add(key + "/arrived", 1)) == core.meeting.world_size) check(store.set(key + "/go", {}));
  while (!is_set(store, key + "/go", patience.slice())) {
    std::string missing;
    for (const auto& peer : world) {
      if (is_set(store, key + "/at/" + peer.name, {})) continue;
      const auto now = core.raw().find(peer.name, {});
      const bool gone = now.ok() ? now->incarnation != peer.incarnation : now.status().code() == Code::not_found;
      // Check again: the peer may have arrived and left since the first check.
      if (gone && !is_set(store, key + "/at/" + peer.name, {})) {
        throw ConnectionLost("shutdown: \"" + peer.name + "\" was lost before it reached the shutdown");
      }
      missing += (missing.empty() ? "" : ", ") + peer.name;
    }
    if (patience.over()) {
      throw DeadlineExceeded("shutdown: still waiting for " + (missing.empty() ? "the store" : missing));
    }
  }
}

}  // namespace

// Detects termination by rounds. In each round, an agent waits until it is idle, marks the round busy if it has made or
// served a call since its last round, and waits for all other agents to arrive. If no agent marks the round busy, all
// agents were idle at one moment between this round and the last. No call was in flight then, so none can begin.
void finish(AgentCore& core, Milliseconds timeout) {
  const Patience patience(timeout);
  if (core.meeting.world_size == 0) return wait_until_idle(core, patience);
  const auto world = value_or_throw(core.raw().wait_for_world(core.meeting.world_size, Milliseconds(60000)));
  auto& store = *core.meeting.store;
  const auto base = core.meeting.prefix + "/shutdown/";
  std::optional<std::pair<std::uint64_t, std::uint64_t>> before;
  for (int number = 0;; ++number) {
    wait_until_idle(core, patience);
    const auto counters = core.raw().counters();
    const auto key = base + std::to_string(number);
    const std::pair now(counters.calls_sent, counters.calls_served);
    if (before != now) value_or_throw(store.add(key + "/busy", 1));
    before = now;
    wait_for_all(core, world, key, patience);
    if (value_or_throw(store.add(key + "/busy", 0)) == 0) break;
  }
  // Rank 0 may serve the store, which the other agents still read: it waits up to 5 s for them.
  value_or_throw(store.add(base + "done", 1));
  const auto until = Clock::now() + std::chrono::seconds(5);
  while (core.self().rank == 0 && Clock::now() < until) {
    const auto done = store.add(base + "done", 0);
    if (!done.ok() || *done >= core.meeting.world_size) break;
    std::this_thread::sleep_for(Milliseconds(1));
  }
}

}  // namespace tensorferry::detail
