#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "agent/rendezvous/tcp_store.h"
#include "python/csrc/agent.h"
#include "python/csrc/agent_options.h"
#include "python/csrc/call.h"
#include "python/csrc/errors.h"
#include "python/csrc/interruptible.h"
#include "python/csrc/metrics.h"
#include "python/csrc/references.h"
#include "rpc/member/rendezvous.h"
#include "rpc/store_adapter.h"

namespace tensorferry::python {
namespace {

py::bytes python_bytes(ByteView bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// ---- rendezvous

py::object store_get(const std::shared_ptr<Store>& store, const std::string& key, double timeout) {
  const auto got = interruptible("the store", [store, key, timeout] { return store->get(key, milliseconds(timeout)); });
  if (got.status().code() == Code::deadline_exceeded) return py::none();
  return python_bytes(value_or_raise(got));
}

void bind_stores(py::module_& module) {
  py::class_<Store, std::shared_ptr<Store>>(module, "Store", "The store at which agents meet.")
      .def(
          "set",
          [](const std::shared_ptr<Store>& store, const std::string& key, const std::string& value) {
            check(interruptible("the store", [store, key, value] { return store->set(key, view_of(value)); }));
          },
          py::arg("key"), py::arg("value"))
      .def("get", &store_get, py::arg("key"), py::arg("timeout"),
           "Returns the value; None if it is not set within `timeout` seconds.")
      .def(
          "add",
          [](const std::shared_ptr<Store>& store, const std::string& key, std::int64_t amount) {
            return value_or_raise(interruptible("the store", [store, key, amount] { return store->add(key, amount); }));
          },
          py::arg("key"), py::arg("amount"));

  module.def(
      "adapt_store",
      [](c10::intrusive_ptr<c10d::Store> store) -> std::shared_ptr<Store> {
        return std::make_shared<StoreAdapter>(std::move(store));
      },
      py::arg("store"), "Returns a Store that uses one of torch's stores.");

  py::class_<TcpStoreServer>(module, "StoreServer", "Serves a Store until it is dropped.")
      .def(py::init([](const std::string& host, std::uint16_t port, std::string key, const std::string& tls) {
             return value_or_raise(
                 unlocked([&] { return TcpStoreServer::listen(host, port, std::move(key), {}, tls); }));
           }),
           py::arg("host"), py::arg("port"), py::arg("key"), py::arg("tls"))
      .def_property_readonly("port", &TcpStoreServer::port, "The port that the server listens on.");
  module.def(
      "connect_store",
      [](const std::string& host, std::uint16_t port, const std::string& key, double timeout, const std::string& tls) {
        return value_or_raise(interruptible("the store", [host, port, key, timeout, tls] {
          return connect_tcp_store(host, port, key, milliseconds(timeout), {}, tls);
        }));
      },
      py::arg("host"), py::arg("port"), py::arg("key"), py::arg("timeout"), py::arg("tls"));

  py::class_<Rendezvous>(module, "Rendezvous", "The store that an init_method names, and the rank and the world size.")
      .def(py::init([](const std::string& method, int rank, int world_size) {
             return value_or_raise(find_rendezvous(method, rank, world_size));
           }),
           py::arg("method"), py::arg("rank"), py::arg("world_size"))
      .def_property_readonly("built_in", [](const Rendezvous& self) { return self.kind == Rendezvous::Kind::own; })
      .def_readonly("host", &Rendezvous::host)
      .def_readonly("port", &Rendezvous::port)
      .def_readonly("path", &Rendezvous::path)
      .def_readonly("torchrun", &Rendezvous::torchrun)
      .def_readonly("place", &Rendezvous::place)
      .def_readonly("rank", &Rendezvous::rank)
      .def_readonly("world_size", &Rendezvous::world_size);
  module.def("world_prefix", &world_prefix, py::arg("place"), py::arg("world_size"), py::arg("rank"),
             "The prefix of a member's keys in the store.");
}

// ---- the agent

using DevicePairs = std::vector<std::pair<std::pair<int, int>, std::pair<int, int>>>;

DeviceMaps device_maps_of(const py::dict& given) {
  DeviceMaps maps;
  for (const auto& [peer, pairs] : given["device_maps"].cast<std::map<std::string, DevicePairs>>()) {
    for (const auto& [local, remote] : pairs) maps[peer].map.emplace_back(device_of(local), device_of(remote));
  }
  return maps;
}

PythonAgent::Trust trust_of(const std::string& name) {
  if (name == "full") return PythonAgent::Trust::full;
  if (name == "registered") return PythonAgent::Trust::registered;
  raise(Status(Code::invalid_argument, "trust is \"full\" or \"registered\", not \"" + name + "\""));
}

std::tuple<std::string, int, std::uint64_t> python_peer(const PeerInfo& peer) {
  return {peer.name, peer.rank, peer.incarnation};
}

py::dict explain(PythonAgent& agent, py::handle peer, std::pair<int, int> local, const py::object& device,
                 std::size_t bytes) {
  const auto name = agent.find(peer).name;
  RawCallOptions options;
  agent.place(options, name, device.is_none() ? nullptr : device.ptr());
  const auto route = value_or_raise(
      interruptible("a connection to \"" + name + "\"",
                    [member = agent.member().shared_from_this(), name, local, placement = options.arguments, bytes] {
                      return member->agent().explain(name, device_of(local), placement, bytes);
                    }));
  py::list candidates;
  for (const auto& candidate : route.candidates) {
    candidates.append(py::make_tuple(candidate.channel, candidate.usable, candidate.reason));
  }
  using namespace py::literals;
  return py::dict("peer"_a = name, "remote"_a = text_of(route.remote), "channel"_a = route.channel,
                  "transport"_a = route.transport, "no_ring"_a = route.no_ring, "candidates"_a = candidates);
}

py::dict counters(PythonAgent& agent) {
  agent.check_usable_here();
  const auto now = agent.agent().counters();
  const auto held = agent.references().counts();
  using namespace py::literals;
  return py::dict(
      "calls_sent"_a = now.calls_sent, "calls_served"_a = now.calls_served, "calls_failed"_a = now.calls_failed,
      "late_answers"_a = now.late_answers, "late_replies"_a = now.late_replies, "bytes_sent"_a = now.bytes_sent,
      "bytes_received"_a = now.bytes_received, "objects"_a = held.objects, "references_given"_a = held.forks,
      "references_held"_a = held.holds, "pinned_bytes"_a = now.pinned_bytes);
}

}  // namespace

void bind_agent(py::module_& module) {
  bind_stores(module);
  py::class_<Exposed>(module, "Exposed", "Functions and classes, by the names by which peers may call them.")
      .def(py::init<>())
      .def("add", &Exposed::add, py::arg("name"), py::arg("callable"));
  auto agent = py::class_<PythonAgent, std::shared_ptr<PythonAgent>>(module, "Agent");
  agent
      .def(py::init([](const std::string& name, int rank, std::shared_ptr<Store> store, double timeout,
                       const py::dict& options, const std::string& trust, const Exposed& exposed) {
             return PythonAgent::create(options_of(name, rank, std::move(store), options),
                                        options["world_size"].cast<int>(), timeout, trust_of(trust), exposed,
                                        device_maps_of(options));
           }),
           py::arg("name"), py::arg("rank"), py::arg("store"), py::arg("timeout"), py::arg("options"), py::arg("trust"),
           py::arg("exposed"))
      .def("_announce", &PythonAgent::announce)
      .def("_expose", &PythonAgent::expose, py::arg("name"), py::arg("callable"))
      .def_property_readonly("_registered", &PythonAgent::registered)
      .def("_leave", &PythonAgent::leave)
      .def_property_readonly("_left", &PythonAgent::left)
      .def("_check_usable_here", &PythonAgent::check_usable_here)
      .def_property_readonly("_usable_here", [](const PythonAgent& self) { return self.agent().usable_here().ok(); })
      .def_property_readonly("_self", [](PythonAgent& self) { return python_peer(self.self()); })
      .def("_find", [](PythonAgent& self, py::handle to) { return python_peer(self.find(to)); })
      .def("_wait_for_world", &PythonAgent::wait_for_world, py::arg("timeout"))
      .def("_finish", &PythonAgent::finish, py::arg("timeout"))
      .def("_in_flight",
           [](const PythonAgent& self) {
             const auto now = self.member().in_flight();
             return py::make_tuple(now.made, now.served, now.unread, now.references);
           })
      .def("_link_state",
           [](const PythonAgent& self, const std::string& peer) { return self.agent().link_state(peer); })
      .def("_explain", &explain)
      .def("_counters", &counters)
      .def("_start_trace", [](PythonAgent& self) { return self.agent().start_trace(); })
      .def("_stop_trace",
           [](PythonAgent& self, std::size_t recording) {
             return unlocked([&] { return self.agent().stop_trace(recording); });
           })
      .def_property("_timeout", &PythonAgent::default_timeout, &PythonAgent::set_default_timeout);

  {
    py::options options;
    options.disable_function_signatures();  // pybind11's would leave out None
    module.def("default_agent", &PythonAgent::default_agent, R"(default_agent() -> Agent | None

Returns the agent of init_rpc; None if there is none.)");
    module.def("set_default_agent", &PythonAgent::set_default_agent, py::arg("agent").none(true),
               "set_default_agent(agent: Agent | None) -> None");
  }
  module.def("current_agent", &PythonAgent::current,
             "Returns the agent that serves this call, else the default agent.");
  module.def("is_serving", &PythonAgent::is_serving,
             "Returns whether this thread, or asyncio task, serves a call of a peer.");
  module.def("leave_all", &PythonAgent::leave_all,
             "Leaves with every agent, at the end of the process. Our threads do not enter Python afterwards.");
  bind_metrics(agent);
  bind_calls(module, agent);
}

}  // namespace tensorferry::python
