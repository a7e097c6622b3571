/// What RawAgent::metrics() returns: counts since the agent joined, and the state at one moment. docs/metrics.md lists
/// the metrics that Python makes of it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "agent/message.h"
#include "agent/observing/latency_histogram.h"
#include "agent/reports.h"

namespace tensorferry {

/// One link at one moment. Its counts begin with the link.
struct LinkMetrics {
  PeerInfo peer;                           // incarnation 0: not connected yet
  std::string state;                       // "up", "dialling", "idle" (neither), "ended"
  std::string transport;                   // of calls: "ring", "unix", "tcp"; "" unless it is up
  std::string no_ring;                     // why `transport` is not "ring"; "" if it is
  std::size_t in_flight = 0, waiting = 0;  // calls sent and not answered; calls that wait for a connection
  std::uint64_t calls_made = 0, calls_served = 0;
  std::uint64_t bytes_sent = 0, bytes_received = 0;  // of buffers
  /// Since the last sign of life; -1: not connected, or the peer is on this host, where its process is watched.
  double silent_seconds = -1;
};

/// A call in flight that this agent has made.
struct CallMetrics {
  std::string function, peer;
  std::chrono::nanoseconds age{};
  bool sent = false;
};

struct AgentMetrics {
  static constexpr std::size_t most_oldest_calls = 16;

  Counters counters;
  std::map<std::string, std::uint64_t> failed;  // calls that failed here, by the name of the error
  LatencyCounts call_time;                      // calls made: from the call to its end
  LatencyCounts serve_time;                     // calls served: from the request's arrival to its answer
  LatencyCounts queue_time;                     // calls served: from the request's arrival to its function's start
  std::size_t pending = 0, serving = 0;         // as RawAgent::in_flight()
  std::size_t busy = 0, most = 0, queued = 0;   // functions that run, that may run, and that wait for a place
  std::size_t threads = 0;                      // of the agent's pool
  std::size_t held_bytes = 0, idle_bytes = 0;   // receive memory: held by receivers, and kept for the next ones
  std::uint64_t links_opened = 0, links_lost = 0;
  std::uint64_t dials_failed = 0;
  std::vector<LinkMetrics> links;
  std::vector<CallMetrics> oldest_calls;  // the oldest one first
};

struct Engine;
/// Returns the metrics of an agent whose counters are `counters`.
AgentMetrics metrics_of(Engine& engine, Counters counters);

}  // namespace tensorferry
