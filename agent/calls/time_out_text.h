/// The text of DeadlineExceeded: how far the call came, how long each stage took, how busy the peer was, and what
/// helps.
#pragma once

#include <optional>
#include <string>

#include "agent/call_state.h"

namespace tensorferry {

/// What the caller knows of the connection to the callee when the deadline passes.
struct TimeOutContext {
  std::string peer;
  bool connected = false;
  std::string dialling;                    // ": " and what the attempt to connect does now, or ""
  std::string transport;                   // of the call's request
  std::optional<Clock::duration> silence;  // since the last sign of life; nullopt: the peer has never been reached
  std::string awaited{};                   // ": " and what the buffers of a reply wait for (ChannelSet::awaited)
};

/// Pure. `now`: the time at which the call ends.
std::string time_out_text(const Call::State& call, const TimeOutContext& view, Clock::time_point now);

}  // namespace tensorferry
