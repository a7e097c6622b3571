/// Records the calls of one agent, those that it makes and those that it serves, as a trace that Perfetto and
/// chrome://tracing show. docs/tracing.md is the user's guide.
///
/// While no recording is under way, a call costs one relaxed load. While one is, a call has a CallRecord at each end,
/// which is added when the call ends there. Several recordings may be under way at once.
///
/// Threads: any.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "agent/message.h"
#include "base/clock.h"

namespace tensorferry {

/// One call as one of its ends saw it.
struct CallRecord {
  /// The stages of a call, in order. The caller has the first row, the callee the second one.
  enum Stage : std::uint8_t { made = 0, sent = 1, answered = 2, landed = 3 };
  enum ServedStage : std::uint8_t { received = 0, queued = 1, started = 2, replied = 3 };

  bool served = false;  // seen by the callee
  std::string function, peer;
  std::uint64_t bytes = 0;                          // of the request's payload and buffers
  std::uint64_t flow = 0;                           // the same number at both ends
  std::array<std::atomic<Clock::rep>, 4> stages{};  // 0: not reached
  const char* transport = "";                       // of the request
  std::atomic<int> channel{-1};                     // of the request's first buffer; see ChannelSet::Built
  std::string channel_name;                         // "": it had no buffer, or this is the callee's record
  Code code = Code::ok;

  void reach(std::size_t stage, Clock::time_point now) noexcept { stages[stage] = now.time_since_epoch().count(); }
};

class CallTrace final {
 public:
  /// A recording keeps at most this many records. The later ones are counted and dropped.
  static constexpr std::size_t most_records = std::size_t{1} << 18;

  [[nodiscard]] bool on() const noexcept { return recordings_.load(std::memory_order_relaxed) != 0; }
  /// Begins a recording, and returns its number for stop().
  std::size_t start();
  /// Ends a recording, and returns its calls as JSON. `self`, `boot_id`: the agent, and the kernel whose clock it
  /// reads.
  std::string stop(std::size_t recording, const PeerInfo& self, const std::string& boot_id);
  void add(std::shared_ptr<const CallRecord> record);

  /// Returns the number that ties the two ends of a call together.
  static std::uint64_t flow_of(std::uint64_t caller, std::uint64_t callee, std::uint64_t call) noexcept;

 private:
  std::atomic<int> recordings_{0};
  std::mutex mutex_;  // guards the next two
  std::vector<std::shared_ptr<const CallRecord>> records_;
  std::uint64_t dropped_ = 0;
};

/// Returns `path` with the agent's name and the process's id before the extension, so that each agent has its own file.
std::string trace_path(const std::string& path, const std::string& agent);
/// Writes the text to a file; an error is logged.
void write_trace(const std::string& path, const std::string& text);

}  // namespace tensorferry
