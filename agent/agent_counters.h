/// What one agent counts; RawAgent::counters() reads it.
///
/// Threads: any.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "agent/agent_drivers.h"
#include "agent/late_answers.h"

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
};

}  // namespace tensorferry
