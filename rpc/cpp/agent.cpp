#include "tensorferry/agent.h"

#include <algorithm>
#include <utility>

#include "agent/buffers/placement.h"
#include "agent/rendezvous/memory_store.h"
#include "agent/rendezvous/tcp_store.h"
#include "rpc/core/envelope.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "rpc/cpp/objects.h"
#include "tensorferry/plugin.h"

namespace tensorferry {
namespace {

detail::DeviceSettings device_settings_of(AgentOptions& options) {
  detail::DeviceSettings out{std::move(options.devices), {}};
  for (const auto& [peer, map] : options.device_maps) out.maps.emplace(peer, detail::placement_of(map));
  return out;
}

}  // namespace

RawAgentOptions detail::raw_options_of(AgentOptions& options, const OpenRendezvous& meeting) {
  RawAgentOptions out;
  out.rank = meeting.rank;
  out.name = options.name.empty() && meeting.rank >= 0 ? "worker" + std::to_string(meeting.rank) : options.name;
  if (out.name.empty()) throw InvalidArgument("an agent without a rank needs a name: set AgentOptions::name");
  out.store = meeting.store;
  out.prefix = meeting.prefix;
  out.reaches = meeting.host;
  out.key = std::move(options.key);
  out.channels = std::move(options.channels);
  check(Plugins::of_process().add_channels_to(out.registry));
  if (options.register_channels) options.register_channels(out.registry);
  if (options.devices) options.devices->add_to(out);
  out.max_threads = options.threads;
  out.max_bytes_in_flight = options.max_bytes_in_flight;
  out.max_queued_calls = options.max_queued_calls;
  out.max_queued_bytes = options.max_queued_bytes;
  out.heartbeat = options.heartbeat;
  out.peer_timeout = options.peer_timeout;
  out.interface = std::move(options.interface);
  out.ports = std::move(options.ports);
  out.socket_dir = std::move(options.socket_dir);
  out.tls = std::move(options.tls);
  out.trace = std::move(options.trace);
  out.unix_sockets = options.unix_sockets;
  out.shared_memory = options.shared_memory;
  return out;
}

Placement detail::placement_of(const DeviceMap& map) {
  check(check_map(map));
  return {{}, map};
}

std::shared_ptr<Agent> Agent::join(AgentOptions options) {
  auto meeting = detail::meet(options);
  auto raw = detail::raw_options_of(options, meeting);
  auto devices = device_settings_of(options);
  auto member = detail::value_or_throw(Member::create(std::move(raw), meeting.world_size));
  const auto core =
      std::make_shared<detail::AgentCore>(std::move(meeting), std::move(member), options.timeout, std::move(devices));
  detail::serve_objects(core);
  std::shared_ptr<Agent> agent(new Agent(core));
  if (options.prepare) options.prepare(*agent);
  detail::check(core->member->announce());
  detail::check(core->member->wait_for_world(std::max(options.join_timeout, Milliseconds(1))));
  return agent;
}

Agent::~Agent() { core_->leave(); }

const std::string& Agent::name() const { return core_->self().name; }
int Agent::rank() const { return core_->self().rank; }
std::string Agent::peer(int rank) const { return detail::value_or_throw(core_->member->find(rank)).name; }
void Agent::leave() { core_->leave(); }
void Agent::shutdown(std::chrono::milliseconds timeout) {
  // Peers of no world may go on using regions here for ever, and the calls of their visits would be waited for.
  core_->end_regions(core_->meeting.world_size != 0);
  const auto finished = core_->member->finish(timeout);
  core_->leave();
  detail::check(finished);
}
std::string Agent::link_state(std::string_view peer) const { return core_->raw().link_state(peer); }
std::size_t Agent::start_trace() { return core_->raw().start_trace(); }
std::string Agent::stop_trace(std::size_t recording) { return core_->raw().stop_trace(recording); }
std::pair<std::size_t, std::size_t> Agent::in_flight() const { return core_->raw().in_flight(); }

std::string Agent::explain(std::string_view peer, Device local, Device remote, std::size_t bytes) const {
  const auto route = detail::value_or_throw(core_->raw().explain(peer, local, {.all = remote, .map = {}}, bytes));
  std::string out = std::string(peer) + ": " + text_of(local) + " -> " + text_of(remote) + " by " +
                    (route.channel.empty() ? "no channel" : route.channel) + ", calls over " + route.transport + "\n";
  if (!route.no_ring.empty()) out += "  no ring: " + route.no_ring + "\n";
  for (const auto& candidate : route.candidates) {
    out += "  " + candidate.channel + (candidate.usable ? ": usable" : ": not usable") +
           (candidate.reason.empty() ? "" : ", " + candidate.reason) + "\n";
  }
  return out;
}

void Agent::serve_function(std::string name, std::unique_ptr<detail::Function> function) {
  const auto parsed = parse_function(name);
  if (!parsed || parsed->kind != FunctionKind::served || name.size() > 4096) {
    throw InvalidArgument("\"" + name +
                          "\" cannot be served: a name is not empty and begins with none of py:, op:, tf:");
  }
  auto handler = detail::handler_of(core_, name, std::move(function));
  core_->raw().serve(std::move(name), std::move(handler));
}

std::shared_ptr<detail::Pending> Agent::start(const CallOptions& options, std::string_view peer,
                                              std::string_view function, std::size_t arguments,
                                              detail::WriteArguments write, const void* pack, bool may_hold_object) {
  return detail::start_call(core_, options, peer, function, {}, function, arguments, write, pack, may_hold_object);
}

Object Agent::share(std::string type_name,
                    std::vector<std::pair<std::string, std::unique_ptr<detail::Function>>> methods) {
  auto object = std::make_shared<detail::SharedObject>(type_name);
  for (auto& [name, function] : methods) object->methods[std::move(name)] = std::move(function);
  return {core_, core_->tables().own({std::move(object), false}, std::move(type_name))};
}

// ---- stores

std::shared_ptr<Store> local_store() { return std::make_shared<MemoryStore>(); }

class StoreServer::Server {
 public:
  std::unique_ptr<TcpStoreServer> server;
};

StoreServer::StoreServer(const std::string& host, std::uint16_t port, const std::string& key, const std::string& tls)
    : server_(std::make_unique<Server>()) {
  server_->server = detail::value_or_throw(TcpStoreServer::listen(host, port, key, {}, tls));
}
StoreServer::~StoreServer() = default;
std::uint16_t StoreServer::port() const { return server_->server->port(); }

std::shared_ptr<Store> connect_store(const std::string& host, std::uint16_t port, const std::string& key,
                                     std::chrono::milliseconds timeout, const std::string& tls) {
  return detail::value_or_throw(connect_tcp_store(host, port, key, timeout, {}, tls));
}

}  // namespace tensorferry
