#include "agent/calls/time_out_text.h"

#include <algorithm>

#include "base/text.h"

namespace tensorferry {
namespace {

using Stage = wire::CallStatus::Stage;

std::string shown(Clock::duration duration) {
  const auto ms = std::max<std::int64_t>(0, std::chrono::duration_cast<Milliseconds>(duration).count());
  if (ms < 100) return formatted("{} ms", ms);
  return formatted("{}.{} s", ms / 1000, ms / 100 % 10);
}

std::string unsent(const Call::State& call, const TimeOutContext& view) {
  switch (call.progress.hold) {
    case SendHold::probe:
      return "not sent, because the channel that it needs is still being tested";
    case SendHold::order:
      return "not sent, because an earlier call of its order key waits for a channel that is being tested";
    default:
      break;
  }
  if (view.connected) return "not sent yet";
  auto text = "not sent, because no connection to it could be opened yet" + view.dialling;
  if (view.silence) text += formatted("; last heard of the peer {} ago", shown(*view.silence));
  return text;
}

/// Describes a call of which the callee has told nothing.
std::string unheard(const Call::State& call, const TimeOutContext& view, Clock::time_point now) {
  const auto sent = Clock::time_point(Clock::duration(call.progress.sent_at));
  auto text = formatted("sent {} ago by {}, not known to have been received", shown(now - sent), view.transport);
  if (!view.connected) text += "; the connection is lost";
  if (view.silence) text += formatted("; last heard of the peer {} ago", shown(*view.silence));
  return text;
}

std::string handlers(std::uint32_t busy, std::uint32_t most) { return formatted("{} of {} handlers", busy, most); }

/// Describes a call by the callee's report.
std::string reported(const Call::State& call, const CalleeReport& report, bool in_ring) {
  const auto& status = report.status;
  const auto known = std::max(std::chrono::microseconds(0),
                              std::chrono::duration_cast<std::chrono::microseconds>(report.at - call.made));
  const auto ago = [&](std::uint64_t microseconds) {  // a peer may claim any time
    const auto most = static_cast<std::uint64_t>(known.count());
    return shown(known - std::chrono::microseconds(std::min(microseconds, most)));
  };
  if (status.stage == Stage::unknown) {
    return in_ring ? "put into shared memory, from which the peer has not taken it yet"
                   : "answered there, but the answer has not arrived";
  }
  auto text = "received there after " + ago(status.received_us);
  switch (status.stage) {
    case Stage::arriving:
      return text + ", but its arguments had not all arrived";
    case Stage::ordered:
      return text + ", waiting there for an earlier call of its order key";
    case Stage::queued:
      text += ", waiting there for a handler (" + handlers(status.busy, status.handlers) + " are busy";
      if (status.waiting > 1) text += formatted(", {} calls wait", status.waiting);
      return text + ")";
    default:
      break;
  }
  text += ", started after " + ago(status.started_us);
  if (status.busy_at_arrival >= status.handlers)
    text += " (" + handlers(status.busy_at_arrival, status.handlers) + " were busy)";
  return text + ", still running";
}

}  // namespace

std::string time_out_text(const Call::State& call, const TimeOutContext& view, Clock::time_point now) {
  auto text = formatted("\"{}\" on \"{}\": no answer in {}; ", call.shown(), view.peer, shown(call.options.timeout));
  const auto report = call.report();
  bool busy = false;
  if (call.progress.landing) {
    text += "the answer has come, but its tensors had not all arrived" + view.awaited;
  } else if (call.progress.sent_at == 0) {
    text += unsent(call, view);
  } else if (report) {
    text += reported(call, *report, call.place.in_ring);
    const auto& status = report->status;
    busy = status.stage == Stage::queued ? status.busy >= status.handlers : status.busy_at_arrival >= status.handlers;
    busy = busy && status.stage != Stage::unknown;
  } else {
    text += unheard(call, view, now);
  }
  return text + ". Raise timeout= or the deadline around the call" +
         (busy ? ", or max_threads on \"" + view.peer + "\"" : "");
}

}  // namespace tensorferry
