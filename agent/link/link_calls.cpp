// The caller's side of a link: credit for bytes in flight, the start of a call, and what the link tells of itself.
#include <new>
#include <string>
#include <utility>

#include "agent/link/link.h"
#include "base/log.h"
#include "base/out_of_memory.h"
#include "base/text.h"

namespace tensorferry {

Status Link::acquire_credit(std::size_t bytes, const RawCallOptions& options) {
  if (credits_.try_acquire(bytes)) return {};
  const auto until = options.timeout.count() > 0 ? std::optional(engine_->clock.now() + options.timeout) : std::nullopt;
  const WaitInHandler waiting;
  calls_.expect_replies();  // replies carry the acknowledgements that return credit
  if (credits_.wait(bytes, until)) return {};
  return {Code::deadline_exceeded, "\"" + peer().name + "\" did not read the messages that were sent to it before (" +
                                       std::to_string(engine_->options.max_bytes_in_flight) +
                                       " bytes may be in flight). Raise max_bytes_in_flight or timeout"};
}

void Link::start(const std::shared_ptr<Call::State>& call, Message message) {
  try {
    calls_.add(call, message);
    if (!rings_.wanted.load(std::memory_order_relaxed)) want_ring();
    connections_.send_call(call, std::move(message));
  } catch (const std::bad_alloc&) {
    out_of_memory::release_reserve();
    if (call->place.id == 0) {
      credits_.release(call->cost.bytes);
    } else {
      close(out_of_memory::status());  // a part of the request may have been sent
      calls_.fail(call, out_of_memory::status());
    }
    call->complete(out_of_memory::status());
    call->arguments.release();
  }
}

std::string Link::state_text() {
  const auto [deferred, dialling] = connections_.waiting();
  const auto stream = outgoing();
  std::string why_no_ring;
  const auto transport = this->transport(why_no_ring);
  std::string out = "link to \"" + peer().name + "\": " +
                    (closed()   ? "ended, " + status().text()
                     : stream   ? "up, calls by " + transport
                     : dialling ? "being dialled"
                                : "not dialled");
  if (!why_no_ring.empty()) out += ", no ring: " + why_no_ring;
  if (stream) out += "; " + reader_.state_text(*stream);
  out += formatted("; {} calls wait for the link, {} in flight, {} bytes of credit taken", deferred, calls_.count(),
                   credits_.taken());
  return out + calls_.state_text();
}

void Link::note(std::string_view event) {
  engine_->counters.flight.note(FlightSubject::link, peer().name, event);
  log_info(formatted("peer={} {}", peer().name, event));
}

LinkMetrics Link::metrics() {
  LinkMetrics out;
  const auto [deferred, dialling] = connections_.waiting();
  const bool up = connections_.connected();
  const auto session = this->session();
  out.peer = session ? session->peer() : peer();
  out.state = closed() ? "ended" : up ? "up" : dialling ? "dialling" : "idle";
  if (out.state == "up") out.transport = transport(out.no_ring);
  out.in_flight = calls_.count();
  out.waiting = deferred;
  out.calls_made = counters_.calls_made;
  out.calls_served = counters_.calls_served;
  out.bytes_sent = counters_.bytes_sent;
  out.bytes_received = counters_.bytes_received;
  if (session && up && !local())
    out.silent_seconds = std::chrono::duration<double>(engine_->clock.now() - session->last_heard()).count();
  return out;
}

}  // namespace tensorferry
