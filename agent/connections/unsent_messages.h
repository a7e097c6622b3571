/// What waits for the connections on which this side of a link sends: requests and control frames for the connection
/// for calls, buffers for a bulk connection. Each kind is sent in its order.
///
/// Threads: the mutex of Connections guards it.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <list>
#include <utility>

#include "agent/call_state.h"
#include "agent/transport/frame_stream.h"

namespace tensorferry {

/// A call whose request has not been sent.
struct UnsentCall {
  std::shared_ptr<Call::State> call;
  Message message;
};

struct UnsentMessages {
  std::list<UnsentCall> calls;  // a list, because calls are taken out also when there is no memory
  std::deque<std::pair<Bytes, Descriptors>> controls;
  bool refused_controls = false;                           // the link ends, because the peer does not read them
  std::list<std::pair<Bytes, FrameStream::Part>> buffers;  // each with its bulk frame; a list for the same reason

  /// Takes out the calls for which `wanted(call)` is true.
  template <class Wanted>
  std::list<UnsentCall> take_calls_if(const Wanted& wanted) {
    std::list<UnsentCall> taken;
    for (auto next = calls.begin(); next != calls.end();) {
      const auto one = next++;
      if (wanted(*one->call)) taken.splice(taken.end(), calls, one);
    }
    return taken;
  }
  /// Returns how long the calls with `wait_for_ready` may still wait; 0: there is none.
  [[nodiscard]] Milliseconds patience(Clock::time_point now) const {
    Milliseconds longest{0};
    for (const auto& [call, message] : calls) {
      if (!call->options.wait_for_ready) continue;
      const auto left =
          call->deadline ? std::chrono::duration_cast<Milliseconds>(*call->deadline - now) : std::chrono::hours(24);
      longest = std::max(longest, left);
    }
    return longest;
  }
};

}  // namespace tensorferry
