/// What one agent and each of its links count; RawAgent::counters() and RawAgent::metrics() read it.
///
/// Threads: any.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "agent/agent_drivers.h"
#include "agent/observing/carried_bytes.h"
#include "agent/observing/flight_recorder.h"
#include "agent/observing/late_answers.h"
#include "agent/observing/latency_histogram.h"
#include "base/status.h"

namespace tensorferry {

struct AgentCounters {
  /// By index of the driver; the last one counts bytes inside frames.
  using Bytes = std::array<std::atomic<std::uint64_t>, AgentDrivers::most + 1>;
  static constexpr std::size_t inside_frames = AgentDrivers::most;

  std::atomic<std::uint64_t> calls_sent{0}, calls_served{0}, calls_failed{0};
  std::atomic<std::uint64_t> late_replies{0};  // came after their calls had ended here
  LateAnswers late_answers;
  std::atomic<std::size_t> pending{0}, serving{0};
  Bytes bytes_sent{}, bytes_received{};
  CarriedBytes carried;  // of the bytes above
  std::array<std::atomic<std::uint64_t>, code_count> failed_by_code{};
  std::atomic<bool> timed{true};  // the next three are kept; see RawAgent::time_calls
  LatencyHistogram call_time, serve_time, queue_time;
  std::atomic<std::uint64_t> links_opened{0}, links_lost{0}, dials_failed{0};
  FlightRecorder flight;
};

/// What one link counts.
struct LinkCounters {
  std::atomic<std::uint64_t> calls_made{0}, calls_served{0};
  std::atomic<std::uint64_t> bytes_sent{0}, bytes_received{0};  // of buffers
};

}  // namespace tensorferry
