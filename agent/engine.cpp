#include "agent/engine.h"

#include <algorithm>
#include <utility>

#include "agent/link.h"
#include "base/log.h"

namespace tensorferry {

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
      const auto paired = it->second->other_number();
      const bool same = known == peer.incarnation;
      // A peer that dials again has given its link up, even if this side has not seen the end yet.
      const bool twice = peer.link == paired && peer.purpose == wire::Hello::Purpose::calls && it->second->called();
      if (known == 0 || (same && peer.link == paired && !twice) || (same && paired == 0)) return it->second;
      if (gone || (same && peer.link < paired)) return nullptr;
      old = std::move(it->second);
      links.erase(it);
    }
    if (!leaving) links.emplace(peer.name, Link::make(shared_from_this(), {peer.name, -1, 0}, nullptr));
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
  if (next) return next->redial();
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

void Engine::bury(const std::shared_ptr<Session>& session, const Status& why) {
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
    hello.link = link->number();
    hello.other_link = link->other_number();
  }
  hello.purpose = purpose;
  hello.name = self.name;
  hello.rank = self.rank;
  hello.incarnation = self.incarnation;
  hello.expected = expected;
  hello.drivers = descriptors;
  hello.devices = options.devices;
  hello.features = wire::feature::bundles;
  if (options.shared_memory && pool->doorbell().shareable()) hello.features |= wire::feature::ring;
  return hello;
}

bool Engine::tick() {
  pool->tick();
  bool under_way = pool->busy();
  const auto now = Clock::now();
  for (const auto& link : all_links()) under_way = link->tick(now) || under_way;
  return under_way;
}

void Engine::look_after() {
  const auto now = Clock::now();
  for (const auto& link : all_links()) link->keep_alive(now);
  for (const auto& [type, memory] : options.memory) {
    if (auto* ours = dynamic_cast<HostMemory*>(memory.get())) ours->trim();  // the agent's own pool, or a converter's
  }
}

void Engine::run_handler(std::shared_ptr<const RawFunction> function, const std::string& name,
                         const std::shared_ptr<Link>& link, Received arguments, Reply reply) {
  if (reply.cancelled()) {
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
