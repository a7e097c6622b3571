#include "agent/agent.h"

#include <algorithm>
#include <utility>

#include "agent/call_state.h"
#include "agent/dial/connect.h"
#include "agent/idempotent_call.h"
#include "agent/link/engine.h"
#include "agent/link/link.h"
#include "agent/observing/agent_metrics.h"
#include "agent/transport/timer.h"
#include "base/environment.h"
#include "base/log.h"
#include "base/out_of_memory.h"
#include "base/text.h"
#include "channels/pinned_bytes.h"

namespace tensorferry {

class RawAgent::Impl final {
 public:
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Acceptor> acceptor;
  std::mutex leave_mutex;
  bool left = false;
  std::optional<std::size_t> recording;  // for RawAgentOptions::trace

  Status create(RawAgentOptions options);
  void leave();

 private:
  Status learn_key();
  Status prepare_tls();
  void look_after();
  std::unique_ptr<Timer> every_second_;
};

Status RawAgent::Impl::learn_key() {
  auto& options = engine->options;
  if (!options.store)
    return {Code::invalid_argument, "an agent needs a store to find its peers: set AgentOptions::store"};
  auto key = Key::load(options.key);
  if (!key) return key.status();
  engine->identity.key = std::move(*key);
  if (!engine->identity.key.empty() || options.store->loopback()) return {};
  return {Code::unauthenticated,
          formatted("the rendezvous can be reached from other hosts, and there is no cluster key. {}. For one host "
                    "alone, let the rendezvous be at 127.0.0.1 (MASTER_ADDR)",
                    how_to_set_a_key())};
}

Status RawAgent::Impl::prepare_tls() {
  auto tls = Tls::make(engine->options.tls, engine->identity.key);
  if (!tls) return tls.status();
  if (*tls && engine->options.surroundings.network)
    return {Code::invalid_argument, "tls works over this host's sockets alone, not over another network"};
  engine->identity.tls = std::move(*tls);
  return {};
}

Status RawAgent::Impl::create(RawAgentOptions options) {
  if (auto status = check_name(options.name); !status) return status;
  engine = std::make_shared<Engine>(std::move(options));
  if (auto status = learn_key(); !status) return status;
  if (auto status = prepare_tls(); !status) return status;
  if (engine->options.channels.empty()) engine->options.channels = environment::channels.value();
  if (auto status = engine->drivers.open(engine->options); !status) return status;
  auto& record = engine->identity.record = describe_this_process();
  record.name = engine->options.name;
  record.rank = engine->options.rank;
  record.version_min = wire::version_min;
  record.version_max = wire::version_max;

  const std::weak_ptr<Engine> weak = engine;
  const auto& surroundings = engine->options.surroundings;
  if (surroundings.incarnation != 0) record.incarnation = surroundings.incarnation;
  engine->identity.self = {record.name, record.rank, record.incarnation};
  engine->reactor = std::make_unique<Reactor>(
      [weak] {
        const auto alive = weak.lock();
        return alive ? alive->tick() : Pace::rest;
      },
      surroundings.threads);
  Pool::Limits limits;
  limits.threads = surroundings.threads;
  limits.most = std::max(limits.least, engine->options.max_threads);
  engine->pool = std::make_shared<Pool>(
      limits, engine->options.executor, [raw = engine.get()] { raw->reactor->kick(); }, engine->clock);
  auto listening = Acceptor::listen(engine);
  if (!listening) return listening.status();
  acceptor = std::move(*listening);
  log_info(formatted("\"{}\" (pid {}, rank {}) listens at {}{}{}", record.name, record.pid, record.rank,
                     record.unix_address, record.unix_address.empty() ? "" : ", ", joined(record.tcp_addresses, ", ")));
  engine->directory =
      std::make_unique<Directory>(engine->options.store, engine->options.prefix, engine->identity.key, engine->clock);
  if (engine->options.trace.empty()) engine->options.trace = environment::trace.value();
  if (!engine->options.trace.empty()) recording = engine->trace.start();
  engine->pool->start();
  every_second_ = std::make_unique<Timer>(engine->reactor->context(), engine->clock);
  look_after();
  if (surroundings.threads) engine->reactor->start();
  return {};
}

void RawAgent::Impl::look_after() {
  engine->look_after();
  const auto interval =
      std::clamp<Milliseconds>(engine->options.heartbeat / 2, Milliseconds(10), std::chrono::seconds(1));
  const bool set = out_of_memory::with_reserve(
      [&] { every_second_->call_at(engine->clock.now() + interval, [this] { look_after(); }); });
  if (!set) log_warning("out of memory: this agent sends no more heartbeats");
}

/// For functions that peers have called here and that still run. A program that was interrupted ends within a second.
constexpr Milliseconds longest_wait_for_handlers(400);

void RawAgent::Impl::leave() {
  {
    const std::lock_guard lock(leave_mutex);
    if (std::exchange(left, true) || !engine) return;
  }
  engine->leaving = true;
  if (engine->directory) engine->directory->leave();
  if (acceptor) acceptor->stop();
  for (const auto& link : engine->peers.all_links()) {
    link->say_goodbye();
    link->close({Code::agent_closed, "the agent \"" + engine->identity.self.name + "\" was shut down"});
  }
  engine->peers.forget_sessions();
  if (engine->pool) engine->pool->stop(longest_wait_for_handlers);
  engine->functions.clear();
  if (recording) {
    write_trace(trace_path(engine->options.trace, engine->identity.self.name),
                engine->trace.stop(*recording, engine->identity.self, engine->identity.record.boot_id));
  }
  log_info("\"" + engine->identity.self.name + "\" has left");
  if (engine->pool) engine->pool->doorbell().close_descriptor();
  if (!engine->reactor) return;
  while (!engine->options.surroundings.threads && engine->reactor->poll_one()) {
  }
  engine->reactor->stop();
  every_second_.reset();
  acceptor.reset();
  engine->reactor->close();
}

/// Returns Ok, or the error of every function once the agent has left or in a forked child.
static Status ended(const Engine& engine) {
  if (engine.inherited()) return engine.used_after_fork();
  if (engine.leaving) return {Code::agent_closed, "the agent \"" + engine.identity.self.name + "\" was shut down"};
  return {};
}

namespace {

/// Estimates the time that GPUs take to copy the message's buffers: 45 GB/s, the rate through the host's memory. A copy
/// over NVLink takes less, one over sockets more.
std::chrono::nanoseconds device_time_of(const Message& message) {
  std::size_t bytes = 0;
  for (const auto& buffer : message.buffers) bytes += buffer.device.type == DeviceType::cpu ? 0 : buffer.bytes;
  return std::chrono::nanoseconds(bytes / 45);
}

}  // namespace

WaitInHandler::WaitInHandler() {
  if (auto* pool = Pool::current()) pool->about_to_block();
}
WaitInHandler::~WaitInHandler() {
  if (auto* pool = Pool::current()) pool->unblocked();
}

RawAgent::RawAgent(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RawAgent::~RawAgent() {
  if (usable_here())
    leave();
  else
    (void)impl_.release();
}

Result<std::shared_ptr<RawAgent>> RawAgent::create(RawAgentOptions options) {
  auto agent = std::shared_ptr<RawAgent>(new RawAgent(std::make_unique<Impl>()));
  if (auto status = agent->impl_->create(std::move(options)); !status.ok()) return status;
  return agent;
}

Status RawAgent::announce() {
  auto& engine = *impl_->engine;
  auto status = engine.directory->join(engine.identity.record,
                                       [&engine](const Record& other) { return agent_answers(engine, other); });
  if (status.ok()) log_info(formatted("\"{}\" has joined under {}", engine.identity.self.name, engine.options.prefix));
  return status;
}

Result<std::shared_ptr<RawAgent>> RawAgent::join(RawAgentOptions options) {
  auto agent = create(std::move(options));
  if (!agent) return agent;
  if (auto status = (*agent)->announce(); !status.ok()) return status;
  return agent;
}

void RawAgent::leave() {
  if (usable_here()) impl_->leave();
}
const PeerInfo& RawAgent::self() const { return impl_->engine->identity.self; }
const Clock& RawAgent::clock() const noexcept { return impl_->engine->clock; }
Status RawAgent::usable_here() const {
  // Without an engine, create() has failed, and there is nothing to protect from a forked child.
  return impl_->engine && impl_->engine->inherited() ? impl_->engine->used_after_fork() : Status();
}

bool RawAgent::step(Work work) {
  auto& engine = *impl_->engine;
  switch (work) {
    case Work::reactor:
      return engine.reactor->poll_one();
    case Work::pool:
      return engine.pool->run_one();
    case Work::tick:
      return engine.reactor->tick_once() != Pace::rest;
  }
  return false;
}

void RawAgent::serve(std::string name, Handler handler, HandlerOptions options) {
  impl_->engine->functions.serve(std::move(name), std::move(handler), options);
}

void RawAgent::resolve_with(Resolver resolver) { impl_->engine->functions.resolve_with(std::move(resolver)); }

void RawAgent::on_peer_lost(std::function<void(const PeerInfo&, Status)> callback) {
  impl_->engine->peers.on_lost(std::move(callback));
}

Call RawAgent::call(std::string_view peer, std::string_view function, Message message, RawCallOptions options) {
  auto& engine = *impl_->engine;
  auto state = std::make_shared<Call::State>(std::string(function), std::move(options), engine.clock);
  if (auto status = ended(engine); !status) {
    state->complete(std::move(status));
    state->arguments.release();
    return Call(std::move(state));
  }
  const auto bytes = message.bytes();
  auto link = engine.peers.link_to(peer);
  state->link = link;
  if (state->options.idempotent) {
    state->cost.device_time = device_time_of(message);
    IdempotentCall::start(engine.shared_from_this(), peer, state, std::move(message));
    return Call(std::move(state));
  }
  if (bytes != 0) {
    if (auto status = link->acquire_credit(bytes, state->options); !status) {
      state->complete(Status(status.code(),
                             formatted("\"{}\" on \"{}\": not sent, because {}", state->shown(), peer, status.what())));
      state->arguments.release();
      return Call(std::move(state));
    }
    state->cost.bytes = bytes;
    state->cost.device_time = device_time_of(message);
  }
  link->start(state, std::move(message));
  return Call(std::move(state));
}

Result<PeerInfo> RawAgent::find(std::string_view name, Milliseconds timeout) {
  if (auto status = ended(*impl_->engine); !status) return status;
  const auto record = impl_->engine->directory->find(name, timeout);
  if (!record) return record.status();
  return PeerInfo{record->name, record->rank, record->incarnation};
}

Result<PeerInfo> RawAgent::find(int rank, Milliseconds timeout) {
  if (auto status = ended(*impl_->engine); !status) return status;
  const auto record = impl_->engine->directory->find(rank, timeout);
  if (!record) return record.status();
  return PeerInfo{record->name, record->rank, record->incarnation};
}

std::optional<PeerInfo> RawAgent::linked(std::string_view name) const { return impl_->engine->peers.linked(name); }
std::optional<PeerInfo> RawAgent::linked(int rank) const { return impl_->engine->peers.linked(rank); }

Status RawAgent::check_process(std::string_view peer, std::int32_t pid) const {
  const auto link = impl_->engine->peers.known_link(peer);
  return link ? link->check_process(pid) : no_link_to(peer);
}

bool RawAgent::has_ended(const PeerInfo& peer) const {
  const auto record = impl_->engine->directory->find(peer.name, {});
  return record && record->incarnation == peer.incarnation && listener_is_gone(*impl_->engine, *record);
}

bool RawAgent::has_gone(std::string_view peer) const {
  if (linked(peer)) return false;
  const auto record = impl_->engine->directory->find(peer, {});
  if (!record) return record.status().code() == Code::not_found;
  const bool restarts = !environment::value_of("TORCHELASTIC_RUN_ID").empty();
  return tensorferry::has_ended(*impl_->engine, *record, restarts);
}

Result<std::vector<PeerInfo>> RawAgent::wait_for_world(int size, Milliseconds timeout,
                                                       const std::function<Status()>& check) {
  if (auto status = ended(*impl_->engine); !status) return status;
  auto& engine = *impl_->engine;
  const auto members = engine.directory->wait_for_world(
      size, timeout, check,
      [&engine](const Record& record, bool earlier) { return tensorferry::has_ended(engine, record, earlier); });
  if (!members) return members.status();
  std::vector<PeerInfo> world;
  for (const auto& member : *members) world.push_back({member.name, member.rank, member.incarnation});
  return world;
}

Status RawAgent::barrier(const std::string& tag, Milliseconds timeout) {
  if (auto status = ended(*impl_->engine); !status) return status;
  return impl_->engine->directory->barrier(tag, timeout);
}

Result<Route> RawAgent::explain(std::string_view peer, Device local, const Placement& placement, std::size_t bytes) {
  if (auto status = ended(*impl_->engine); !status) return status;
  const auto link = impl_->engine->peers.link_to(peer);
  if (auto status = link->connect(impl_->engine->clock.now() + std::chrono::seconds(10)); !status) return status;
  auto route = link->channels().explain(local, placement, bytes);
  if (route) route->transport = link->transport(route->no_ring);
  return route;
}

std::shared_ptr<OneSided> RawAgent::one_sided(std::string_view peer, Device local, Device remote) {
  if (!ended(*impl_->engine)) return nullptr;
  const auto link = impl_->engine->peers.known_link(peer);
  return link ? link->channels().one_sided({local, remote}) : nullptr;
}

std::string RawAgent::link_state(std::string_view peer) const {
  const auto link = impl_->engine->peers.known_link(peer);
  return link ? link->state_text() : "no link to \"" + std::string(peer) + "\"";
}

Buffer RawAgent::allocate(std::size_t bytes) {
  return impl_->engine->memory.of(DeviceType::cpu).allocate(bytes, Device());
}

/// Returns what was counted, with the bytes that one channel carried for another as those of the other one.
static Counters counters_of(const Engine& engine) {
  const auto& counted = engine.counters;
  const auto& drivers = engine.drivers;
  Counters counters;
  counters.calls_sent = counted.calls_sent;
  counters.calls_served = counted.calls_served;
  counters.calls_failed = counted.calls_failed;
  counters.late_answers = counted.late_answers.count();
  counters.late_replies = counted.late_replies;
  const auto add = [&](std::string name, std::size_t counter) {
    if (const auto sent = counted.bytes_sent[counter].load(); sent != 0) counters.bytes_sent[name] = sent;
    if (const auto got = counted.bytes_received[counter].load(); got != 0) counters.bytes_received[name] = got;
  };
  for (std::size_t i = 0; i < drivers.size(); ++i) add(std::string(drivers[i].name()), i);
  add("inline", AgentCounters::inside_frames);
  counters.pinned_bytes = tensorferry::pinned_bytes().load();
  return counters;
}

Counters RawAgent::counters() const {
  auto counters = counters_of(*impl_->engine);
  const auto split = [](auto& bytes, const std::string& channel, const std::string& carrier, std::uint64_t carried) {
    const auto whole = bytes.find(channel);
    const auto part = whole == bytes.end() ? 0 : std::min(whole->second, carried);
    if (part == 0) return;
    whole->second -= part;
    if (whole->second == 0) bytes.erase(whole);
    bytes[channel + " over " + carrier] = part;
  };
  for (const auto& [names, count] : impl_->engine->counters.carried.all()) {
    split(counters.bytes_sent, names.first, names.second, count.sent);
    split(counters.bytes_received, names.first, names.second, count.received);
  }
  return counters;
}

/// With whole channels: a chunk is counted after its buffer, and the part that is not carried could fall.
AgentMetrics RawAgent::metrics() const { return metrics_of(*impl_->engine, counters_of(*impl_->engine)); }
void RawAgent::time_calls(bool timed) { impl_->engine->counters.timed = timed; }
void RawAgent::note(FlightSubject subject, std::string_view name, std::string_view text) {
  impl_->engine->counters.flight.note(subject, name, text);
}
std::vector<FlightEvent> RawAgent::flight_events() const { return impl_->engine->counters.flight.events(); }

std::size_t RawAgent::start_trace() { return impl_->engine->trace.start(); }
std::string RawAgent::stop_trace(std::size_t recording) {
  const auto& engine = impl_->engine;
  return engine->trace.stop(recording, engine->identity.self, engine->identity.record.boot_id);
}

std::pair<std::size_t, std::size_t> RawAgent::in_flight() const {
  return {impl_->engine->counters.pending, impl_->engine->counters.serving};
}

}  // namespace tensorferry
