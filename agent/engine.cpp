#include "agent/engine.h"

#include <algorithm>
#include <utility>

#include "agent/auth.h"
#include "agent/link.h"
#include "base/log.h"

namespace tensorferry {
namespace {

/// The pidfd of a peer's process on this host. It is readable when the process has ended, even if a forked child still
/// holds the process's sockets.
class PeerProcess final : public Readable {
 public:
  PeerProcess(std::weak_ptr<Engine> engine, std::weak_ptr<Session> session)
      : engine_(std::move(engine)), session_(std::move(session)) {}
  void on_readable() override {
    const auto engine = engine_.lock();
    const auto session = session_.lock();
    // The event may be an older one of another descriptor, which had this one's number and is closed.
    if (engine && session && session->process_ended()) engine->process_ended(session);
  }

 private:
  const std::weak_ptr<Engine> engine_;
  const std::weak_ptr<Session> session_;
};

}  // namespace

Engine::Engine(RawAgentOptions agent_options) : options(std::move(agent_options)) {
  // The CPU's receive memory is this agent's own pool unless the options bring another.
  options.memory.try_emplace(DeviceType::cpu, std::shared_ptr<Memory>(std::shared_ptr<void>(), &host_memory));
}

Engine::~Engine() = default;

Status Engine::used_after_fork() const {
  return {Code::agent_closed,
          "the agent \"" + self.name +
              "\" belongs to the parent of this forked process: start another agent here, under another name"};
}

std::shared_ptr<Link> Engine::link_to(std::string_view name) {
  std::shared_ptr<Link> known;
  {
    const std::lock_guard lock(links_mutex);
    if (const auto it = links.find(name); it != links.end()) known = it->second;
  }
  if (known && !known->closed() && !known->ended_by_peer()) return known;
  std::shared_ptr<Link> link, ended;  // dropped after the mutex is released
  {
    const std::lock_guard lock(links_mutex);
    // The thread that closes a link removes it from this map a moment later.
    if (const auto it = links.find(name); it != links.end() && it->second->closed()) {
      ended = std::move(it->second);
      links.erase(it);
    }
    const auto it = sessions.find(name);
    link = Link::make(shared_from_this(), {std::string(name), -1, 0}, it != sessions.end() ? it->second : nullptr);
    // leave() closes the links that it finds in this map, so no link may be added after that.
    if (!leaving) return links.try_emplace(std::string(name), link).first->second;
  }
  link->close({Code::agent_closed, "the agent \"" + self.name + "\" was shut down"});
  return link;
}

std::shared_ptr<Link> Engine::link_of(const wire::Hello& peer, bool gone) {
  std::shared_ptr<Link> old;
  {
    const std::lock_guard lock(links_mutex);
    const auto it = links.find(peer.name);
    if (it != links.end() && it->second->closed()) {
      old = std::move(it->second);
      links.erase(it);
    } else if (it != links.end()) {
      const auto known = it->second->incarnation();  // 0 also if the link dials for a session that has lost its link
      const auto paired = it->second->connections().other_number();
      const bool same = known == peer.incarnation;
      // A peer that dials again has given its link up, even if this side has not seen the end yet.
      const bool twice = peer.link == paired && peer.purpose == wire::Hello::Purpose::calls &&
                         it->second->connections().stream(ConnectionRole::calls_in);
      if (known == 0 || (same && peer.link == paired && !twice) || (same && paired == 0)) return it->second;
      if (gone || (same && peer.link < paired)) return nullptr;
      old = std::move(it->second);
      links.erase(it);
    }
    // Calls may wait in the new link before it has the connection, and also if it refuses the connection.
    const auto session = sessions.find(peer.name);
    const bool goes_on = session != sessions.end() && session->second->peer().incarnation == peer.incarnation;
    if (!leaving) {
      links.emplace(peer.name, Link::make(shared_from_this(), {peer.name, -1, 0}, goes_on ? session->second : nullptr));
    }
  }
  if (old && old->incarnation() == peer.incarnation) old->close({Code::connection_lost, "it dialled again"});
  if (old && old->incarnation() != peer.incarnation)
    old->close({Code::connection_lost, "it was restarted"}, Loss::peer);
  return link_to(peer.name);
}

void Engine::lost(const std::shared_ptr<Link>& link, const Status& why, Loss loss) {
  const auto session = link->session();
  std::shared_ptr<Link> next;
  {
    const std::lock_guard lock(links_mutex);
    const auto& name = link->peer().name;
    if (const auto it = links.find(name); it != links.end() && it->second == link) links.erase(it);
    if (!session || leaving) return;
    if (loss == Loss::connection && !session->dead() && !session->process_ended()) {
      if (links.contains(name)) return;  // the session has its next link
      next = Link::make(shared_from_this(), {name, -1, 0}, session);
      links.emplace(name, next);
    }
  }
  if (next) return next->connections().dial();
  bury(session, why);
}

std::shared_ptr<Session> Engine::session_of(const PeerInfo& peer) {
  std::shared_ptr<Session> session, before;
  {
    const std::lock_guard lock(links_mutex);
    auto& known = sessions[peer.name];
    if (known && known->peer().incarnation == peer.incarnation) return known;
    before = std::exchange(known, std::make_shared<Session>(peer));
    session = known;
  }
  if (before) bury(before, {Code::connection_lost, "\"" + peer.name + "\" was restarted"});
  return session;
}

void Engine::watch_process(const std::shared_ptr<Session>& session, FileDescriptor process) {
  const int added = session->watch(std::move(process));
  if (added >= 0) pool->add(added, std::make_shared<PeerProcess>(weak_from_this(), session), Pool::Watch::always);
}

void Engine::process_ended(const std::shared_ptr<Session>& session) {
  const Status why(Code::connection_lost, "its process has ended");
  std::shared_ptr<Link> link;
  {
    const std::lock_guard lock(links_mutex);
    const auto it = links.find(session->peer().name);
    if (it != links.end() && it->second->session() == session) link = it->second;
  }
  if (link && !link->connections().leave_session(*session)) return link->close(why, Loss::peer);
  bury(session, why);
}

void Engine::bury(const std::shared_ptr<Session>& session, const Status& why) {
  if (const int process = session->process(); process >= 0) pool->remove(process);
  {
    const std::lock_guard lock(links_mutex);
    const auto it = sessions.find(session->peer().name);
    if (it != sessions.end() && it->second == session) sessions.erase(it);
  }
  if (leaving || !session->bury()) return;
  std::function<void(const PeerInfo&, Status)> tell;
  {
    const std::lock_guard lock(resolver_mutex);
    tell = peer_lost;
  }
  if (tell) pool->submit([tell, peer = session->peer(), why] { tell(peer, why); });
}

std::vector<std::shared_ptr<Link>> Engine::all_links() {
  const std::lock_guard lock(links_mutex);
  std::vector<std::shared_ptr<Link>> all;
  all.reserve(links.size());
  for (const auto& [name, link] : links) all.push_back(link);
  return all;
}

Memory& Engine::memory_of(DeviceType type) {
  const auto it = options.memory.find(type);
  return it != options.memory.end() ? *it->second : host_memory;
}

wire::Hello Engine::hello(wire::Hello::Purpose purpose, const Link* link, std::uint64_t expected) const {
  wire::Hello hello;
  if (link != nullptr) {
    hello.link = link->connections().number();
    hello.other_link = link->connections().other_number();
  }
  hello.purpose = purpose;
  hello.name = self.name;
  hello.rank = self.rank;
  hello.incarnation = self.incarnation;
  hello.expected = expected;
  hello.drivers = descriptors;
  hello.devices = options.devices;
  hello.features = wire::feature::bundles | wire::feature::several_bulk | wire::feature::status | wire::feature::link;
  if (options.shared_memory && pool->doorbell().shareable()) hello.features |= wire::feature::ring;
  return hello;
}

void Engine::activate(std::weak_ptr<Link> link) {
  {
    const std::lock_guard lock(active_mutex_);
    active_links_.push_back(std::move(link));
  }
  reactor->kick();
}

Pace Engine::tick() {
  pool->tick();
  auto pace = pool->busy() ? Pace::run : Pace::rest;
  const auto now = Clock::now();
  std::vector<std::weak_ptr<Link>> candidates, active;
  {
    const std::lock_guard lock(active_mutex_);
    candidates.swap(active_links_);
  }
  for (auto& each : candidates) {
    const auto link = each.lock();
    if (!link) continue;
    const auto wanted = link->tick(now);
    pace = std::max(pace, wanted);
    if (wanted != Pace::rest && link->stay_active()) active.push_back(std::move(each));
  }
  if (active.empty()) return pace;
  const std::lock_guard lock(active_mutex_);
  active_links_.insert(active_links_.end(), active.begin(), active.end());
  return pace;
}

void Engine::look_after() {
  const auto now = Clock::now();
  for (const auto& link : all_links()) {
    link->keep_alive(now);
    if (const auto session = link->session()) session->executions().expire(now);
  }
  late_answers.log_if_due(now);
  for (const auto& [type, memory] : options.memory) {
    if (auto* ours = dynamic_cast<HostMemory*>(memory.get())) ours->trim();  // the agent's own pool, or a converter's
  }
}

void Engine::run_handler(std::shared_ptr<const RawFunction> function, const std::string& name,
                         const std::shared_ptr<Link>& link, Received arguments, Reply reply) {
  if (!reply.begin()) {
    const bool expired = reply.deadline() && *reply.deadline() <= Clock::now();
    const std::string called(shown_name(function ? function->name : name));
    return reply.fail({expired ? Code::deadline_exceeded : Code::cancelled,
                       "\"" + called + "\": " + (expired ? "its deadline had passed" : "its caller had cancelled it") +
                           " before it could run on \"" + self.name + "\""});
  }
  if (!function) {
    RawAgent::Resolver resolve;
    {
      const std::lock_guard lock(resolver_mutex);
      resolve = resolver;
    }
    function = functions.find(name);  // another request may have resolved it meanwhile
    if (!function && resolve) {
      auto found = resolve(name);
      if (!found.ok()) {
        if (found.status().code() == Code::permission_denied) log_refusal(link->peer().name, name, found.status());
        return reply.fail(found.status());
      }
      if (*found) function = functions.serve(name, std::move((*found)->first), (*found)->second);
    }
    if (!function) {
      return reply.fail({Code::not_found, "\"" + self.name + "\" serves no function \"" + name + "\""});
    }
    reply.tell(function->number);
  }
  try {
    function->handler({link->peer(), function->name, std::move(arguments)}, std::move(reply));
  } catch (const std::exception& error) {
    // The reply was moved into the handler, and its destructor has failed the call. A handler should answer with its
    // errors itself.
    log_warning("call=" + function->name + " its handler threw: " + error.what());
  } catch (...) {
    log_warning("call=" + function->name + " its handler threw");
  }
}

}  // namespace tensorferry
