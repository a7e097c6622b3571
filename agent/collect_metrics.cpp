#include <algorithm>
#include <utility>

#include "agent/call_state.h"
#include "agent/link/engine.h"
#include "agent/link/link.h"
#include "agent/observing/agent_metrics.h"

namespace tensorferry {
namespace {

std::vector<CallMetrics> oldest_calls(const std::vector<std::shared_ptr<Link>>& links, Clock::time_point now) {
  std::vector<std::pair<std::shared_ptr<Call::State>, std::string_view>> calls;
  for (const auto& link : links) {
    for (auto& call : link->calls().all()) calls.emplace_back(std::move(call), link->peer().name);
  }
  const auto kept = std::min(calls.size(), AgentMetrics::most_oldest_calls);
  std::partial_sort(calls.begin(), calls.begin() + static_cast<std::ptrdiff_t>(kept), calls.end(),
                    [](const auto& a, const auto& b) { return a.first->made < b.first->made; });
  std::vector<CallMetrics> out;
  for (std::size_t i = 0; i < kept; ++i) {
    const auto& [call, peer] = calls[i];
    out.push_back({call->shown(), std::string(peer), now - call->made, call->progress.sent_at != 0});
  }
  return out;
}

}  // namespace

AgentMetrics metrics_of(Engine& engine, Counters counters) {
  const auto& counted = engine.counters;
  AgentMetrics out;
  out.counters = std::move(counters);
  for (int code = 1; code < code_count; ++code) {
    const auto failed = counted.failed_by_code[static_cast<std::size_t>(code)].load();
    if (failed != 0) out.failed.emplace(name_of(static_cast<Code>(code)), failed);
  }
  out.call_time = counted.call_time.counts();
  out.serve_time = counted.serve_time.counts();
  out.queue_time = counted.queue_time.counts();
  out.pending = counted.pending;
  out.serving = counted.serving;
  if (engine.pool) {
    const auto load = engine.pool->load();
    out.busy = load.busy;
    out.most = load.most;
    out.queued = load.waiting;
    out.threads = static_cast<std::size_t>(std::max(0, engine.pool->threads()));
  }
  const auto memory = engine.memory.usage();
  out.held_bytes = memory.held_bytes;
  out.idle_bytes = memory.idle_bytes;
  out.links_opened = counted.links_opened;
  out.links_lost = counted.links_lost;
  out.dials_failed = counted.dials_failed;
  const auto links = engine.peers.all_links();
  for (const auto& link : links) out.links.push_back(link->metrics());
  out.oldest_calls = oldest_calls(links, engine.clock.now());
  return out;
}

}  // namespace tensorferry
