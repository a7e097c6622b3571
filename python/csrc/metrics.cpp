#include "python/csrc/metrics.h"

#include <pybind11/stl.h>

#include <chrono>
#include <string>
#include <vector>

#include "agent/observing/agent_metrics.h"
#include "agent/observing/flight_recorder.h"

namespace tensorferry::python {
namespace {

using namespace py::literals;

double seconds(std::chrono::nanoseconds duration) { return std::chrono::duration<double>(duration).count(); }

/// Names come from peers, and texts may quote what they sent: bytes that are no UTF-8 are replaced.
py::str shown(std::string_view text) {
  auto* made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(made);
}

py::tuple latency(const LatencyCounts& counts) {
  return py::make_tuple(std::vector<std::uint64_t>(counts.counts.begin(), counts.counts.end()),
                        static_cast<double>(counts.nanoseconds) * 1e-9);
}

py::dict link_dict(const LinkMetrics& link) {
  return py::dict("peer"_a = shown(link.peer.name), "rank"_a = link.peer.rank, "state"_a = link.state,
                  "transport"_a = link.transport, "no_ring"_a = shown(link.no_ring), "in_flight"_a = link.in_flight,
                  "waiting"_a = link.waiting, "calls_made"_a = link.calls_made, "calls_served"_a = link.calls_served,
                  "bytes_sent"_a = link.bytes_sent, "bytes_received"_a = link.bytes_received,
                  "silent_seconds"_a = link.silent_seconds);
}

py::dict metrics(PythonAgent& agent) {
  agent.check_usable_here();
  AgentMetrics now;
  {
    GilReleased gil;
    now = agent.agent().metrics();
  }
  const auto held = agent.references().counts();
  py::list links, oldest;
  for (const auto& link : now.links) links.append(link_dict(link));
  for (const auto& call : now.oldest_calls)
    oldest.append(py::make_tuple(shown(call.function), shown(call.peer), seconds(call.age), call.sent));
  const auto& counters = now.counters;
  py::dict out("calls_sent"_a = counters.calls_sent, "calls_served"_a = counters.calls_served, "failed"_a = now.failed,
               "late_answers"_a = counters.late_answers, "late_replies"_a = counters.late_replies,
               "bytes_sent"_a = counters.bytes_sent, "bytes_received"_a = counters.bytes_received,
               "pinned_bytes"_a = counters.pinned_bytes, "call_time"_a = latency(now.call_time),
               "serve_time"_a = latency(now.serve_time), "queue_time"_a = latency(now.queue_time),
               "pending"_a = now.pending, "serving"_a = now.serving, "busy"_a = now.busy, "most"_a = now.most,
               "queued"_a = now.queued, "threads"_a = now.threads, "held_bytes"_a = now.held_bytes,
               "idle_bytes"_a = now.idle_bytes, "links_opened"_a = now.links_opened, "links_lost"_a = now.links_lost,
               "dials_failed"_a = now.dials_failed);
  out["objects"] = held.objects;
  out["references_given"] = held.forks;
  out["references_held"] = held.holds;
  out["links"] = links;
  out["oldest_calls"] = oldest;
  return out;
}

py::list flight_events(const PythonAgent& agent) {
  agent.check_usable_here();
  py::list out;
  for (const auto& event : agent.agent().flight_events()) {
    const std::chrono::nanoseconds at = event.at.time_since_epoch();
    out.append(py::make_tuple(std::string(name_of(event.subject)), shown(event.name), seconds(at), shown(event.text),
                              event.times));
  }
  return out;
}

}  // namespace

void bind_metrics(py::class_<PythonAgent, std::shared_ptr<PythonAgent>>& agent) {
  agent.def("_metrics", &metrics)
      .def("_flight_events", &flight_events, "Returns (subject, name, CLOCK_MONOTONIC in seconds, text, times) each.")
      .def(
          "_time_calls", [](PythonAgent& self, bool timed) { self.agent().time_calls(timed); }, py::arg("timed"));
}

}  // namespace tensorferry::python
