/// Decides from the bytes that have moved whether a peer on another host is alive. Between hosts, silence is the only
/// sign that it is not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "agent/transport/port.h"
#include "base/clock.h"

namespace tensorferry {

/// Bytes that arrive are a sign of life, also in the middle of a frame. So are bytes that the peer takes, because they
/// hold up the pings behind them; the kernel of a stopped peer takes pings, and a stopped peer counts as silent.
///
/// Threads: one at a time.
class Liveness final {
 public:
  enum class Verdict : std::uint8_t { heard, silent, ask, dead };  // ask: send a ping; dead: three silent intervals

  /// `moved`: by all connections so far. `interval`: the heartbeat.
  Verdict look(Clock::time_point now, const BytesMoved& moved, Clock::duration interval) {
    const bool heard = moved.received != std::exchange(last_.received, moved.received) ||
                       moved.acknowledged > std::exchange(last_.acknowledged, moved.acknowledged) + more_than_pings;
    // This process may have been stopped between two looks, so each adds one interval of silence at most.
    const auto passed = std::min(now - std::exchange(last_look_, now), interval);
    if (heard) {
      silent_ = {};
      return Verdict::heard;
    }
    silent_ += passed;
    if (silent_ > 3 * interval) return Verdict::dead;
    if (silent_ <= interval || now - last_asked_ <= interval) return Verdict::silent;
    last_asked_ = now;
    return Verdict::ask;
  }

 private:
  static constexpr std::uint64_t more_than_pings = 4096;

  Clock::time_point last_look_, last_asked_;
  BytesMoved last_;
  Clock::duration silent_{0};  // without the time during which this process was stopped
};

}  // namespace tensorferry
