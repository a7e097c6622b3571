#include "agent/link/peers.h"

#include <poll.h>

#include <algorithm>
#include <new>
#include <utility>

#include "agent/link/engine.h"
#include "agent/link/link.h"
#include "base/out_of_memory.h"
#include "base/text.h"

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
    if (engine && session && session->process_ended()) engine->peers.process_ended(session);
  }

 private:
  const std::weak_ptr<Engine> engine_;
  const std::weak_ptr<Session> session_;
};

}  // namespace

std::shared_ptr<Link> Peers::link_to(std::string_view name) {
  std::shared_ptr<Link> known;
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = links_.find(name); it != links_.end()) known = it->second;
  }
  if (known && !known->closed() && !known->ended_by_peer()) return known;
  std::shared_ptr<Link> link, ended;  // dropped after the mutex is released
  {
    const std::lock_guard lock(mutex_);
    // The thread that closes a link removes it from this map a moment later.
    if (const auto it = links_.find(name); it != links_.end() && it->second->closed()) {
      ended = std::move(it->second);
      links_.erase(it);
    }
    const auto it = sessions_.find(name);
    link = Link::make(engine_.shared_from_this(), {std::string(name), -1, 0},
                      it != sessions_.end() ? it->second : nullptr);
    // leave() closes the links that it finds in this map, so no link may be added after that.
    if (!engine_.leaving) return links_.try_emplace(std::string(name), link).first->second;
  }
  link->close({Code::agent_closed, "the agent \"" + engine_.identity.self.name + "\" was shut down"});
  return link;
}

/// An agent that calls itself has two links under its name, one for each end of the connection. That of the accepting
/// end has this key, which no other agent's name is.
static std::string accepting_end_of(std::string_view name) { return std::string(name) + "\n"; }

/// Says what a connection is to the known link of its peer, which has not ended. Ok: the link may take it. NotFound: it
/// replaces the link. Otherwise the error of admit().
Status Peers::judge(const Link& known, const Connected& connection, std::optional<uid_t> user) const {
  const auto& hello = connection.hello;
  const bool calls = hello.purpose == wire::Hello::Purpose::calls;
  const auto has = known.incarnation();  // 0 also if the link dials for a session that has lost its link
  const auto number = known.connections().number();
  // Whoever has the key can state the peer's name. A link that lives makes no room for another user.
  if (!known.connections().may_be_of(user))
    return {Code::permission_denied, formatted("\"{}\" has a link of another user", hello.name)};
  if (has == 0 || (has == hello.incarnation && !calls)) return {};
  if (has == hello.incarnation && connection.go == 0 && (connection.dialled || hello.connection < number))
    return {Code::cancelled, "another connection carries the calls"};  // the two sides have dialled at once
  if (has == hello.incarnation && connection.go != 0 && connection.go <= number)
    return {Code::connection_lost, formatted("\"{}\" has given this connection up", hello.name)};
  return {Code::not_found, ""};
}

/// `gone`: the connection has ended already, so it is no reason to end another link.
Result<std::shared_ptr<Link>> Peers::link_of(const Connected& connection, bool gone, std::optional<uid_t> user) {
  const auto& peer = connection.hello;
  const bool own = peer.incarnation == engine_.identity.self.incarnation && !connection.dialled;
  const auto key = own ? accepting_end_of(peer.name) : peer.name;
  std::shared_ptr<Link> old, made;
  {
    const std::lock_guard lock(mutex_);
    const auto it = links_.find(key);
    const bool belongs = it != links_.end() && !it->second->closed() && it->second->incarnation() == peer.incarnation;
    if (peer.purpose != wire::Hello::Purpose::calls && !belongs)  // it adds to a link, and begins none
      return Status(Code::connection_lost, "its link has ended");
    if (it != links_.end()) {
      const auto verdict = it->second->closed() ? Status(Code::not_found, "") : judge(*it->second, connection, user);
      if (verdict.ok()) return it->second;
      if (verdict.code() != Code::not_found) return verdict;
      if (gone && !it->second->closed()) return Status(Code::connection_lost, "it has ended");
      old = std::move(it->second);
      links_.erase(it);
    }
    // Calls may wait in the new link before it has the connection, and also if it refuses the connection.
    const auto session = sessions_.find(peer.name);
    const bool goes_on = session != sessions_.end() && session->second->peer().incarnation == peer.incarnation;
    if (!engine_.leaving) {
      made = Link::make(engine_.shared_from_this(), {peer.name, -1, 0}, goes_on ? session->second : nullptr);
      links_.emplace(key, made);
    }
  }
  if (old && old->incarnation() == peer.incarnation) old->close({Code::connection_lost, "it dialled again"});
  if (old && old->incarnation() != peer.incarnation)
    old->close({Code::connection_lost, "it was restarted"}, Loss::peer);
  return made ? made : link_to(peer.name);
}

Status Peers::admit(Connected connection) {
  pollfd ended{connection.port->descriptor(), POLLRDHUP, 0};
  const bool gone = ::poll(&ended, 1, 0) > 0;
  if ((ended.revents & (POLLHUP | POLLERR)) != 0) return {Code::connection_lost, "it has ended"};
  const auto user = user_at_the_other_end(*connection.port);
  for (;;) {  // a link that ends at this moment does not take the connection: try the link that replaces it
    const auto link = link_of(connection, gone, user);
    if (!link) return link.status();
    try {
      if ((*link)->attach(connection)) return {};
    } catch (const std::bad_alloc&) {  // it may have the connection, and not watch it
      (*link)->close(out_of_memory::status());
      throw;
    }
    if (!connection.port || !(*link)->closed() || engine_.leaving)
      return {Code::connection_lost, "its link has ended, or has such a connection"};
  }
}

void Peers::lost(const std::shared_ptr<Link>& link, const Status& why, Loss loss) {
  const auto session = link->session();
  std::shared_ptr<Link> next;
  {
    const std::lock_guard lock(mutex_);
    const auto& name = link->peer().name;
    for (const auto& key : {name, accepting_end_of(name)}) {
      if (const auto it = links_.find(key); it != links_.end() && it->second == link) links_.erase(it);
    }
    if (!session || engine_.leaving) return;
    if (loss == Loss::connection && !session->dead() && !session->process_ended()) {
      next = links_.contains(name) ? links_.at(name) : Link::make(engine_.shared_from_this(), {name, -1, 0}, session);
      links_.try_emplace(name, next);
    }
  }
  if (next) return next->connections().dial();
  mark_dead(session, why);
}

std::shared_ptr<Session> Peers::session_of(const PeerInfo& peer) {
  std::shared_ptr<Session> session, before;
  {
    const std::lock_guard lock(mutex_);
    const auto known = sessions_.find(peer.name);
    if (known != sessions_.end() && known->second->peer().incarnation == peer.incarnation) return known->second;
    session = std::make_shared<Session>(peer, engine_.clock);
    if (known != sessions_.end())
      before = std::exchange(known->second, session);
    else
      sessions_.emplace(peer.name, session);
  }
  if (before) mark_dead(before, {Code::connection_lost, "\"" + peer.name + "\" was restarted"});
  return session;
}

void Peers::watch_process(const std::shared_ptr<Session>& session, FileDescriptor process, std::int32_t pid) {
  const int added = session->watch(std::move(process), pid);
  if (added >= 0)
    engine_.pool->add(added, std::make_shared<PeerProcess>(engine_.weak_from_this(), session), Pool::Watch::always);
}

void Peers::process_ended(const std::shared_ptr<Session>& session) {
  const auto why = session->end_of_process(engine_.identity.record.host);
  std::shared_ptr<Link> link;
  {
    const std::lock_guard lock(mutex_);
    const auto it = links_.find(session->peer().name);
    if (it != links_.end() && it->second->session() == session) link = it->second;
  }
  if (link && !link->connections().leave_session(*session)) return link->close(why, Loss::peer);
  mark_dead(session, why);
}

void Peers::mark_dead(const std::shared_ptr<Session>& session, const Status& why) {
  if (const int process = session->process(); process >= 0) engine_.pool->remove(process);
  {
    const std::lock_guard lock(mutex_);
    const auto it = sessions_.find(session->peer().name);
    if (it != sessions_.end() && it->second == session) sessions_.erase(it);
  }
  if (engine_.leaving || !session->mark_dead()) return;
  engine_.counters.flight.note(FlightSubject::link, session->peer().name, "dead: " + std::string(why.what()));
  std::function<void(const PeerInfo&, Status)> tell;
  {
    const std::lock_guard lock(mutex_);
    tell = lost_;
  }
  if (tell) engine_.pool->submit([tell, peer = session->peer(), why] { tell(peer, why); });
}

std::vector<std::shared_ptr<Link>> Peers::all_links() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Link>> all;
  all.reserve(links_.size());
  for (const auto& [name, link] : links_) all.push_back(link);
  return all;
}

std::shared_ptr<Link> Peers::known_link(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  const auto it = links_.find(name);
  return it != links_.end() ? it->second : nullptr;
}

void Peers::on_lost(std::function<void(const PeerInfo&, Status)> callback) {
  const std::lock_guard lock(mutex_);
  lost_.swap(callback);  // the earlier one is destroyed after the lock is released
}

void Peers::forget_sessions() {
  decltype(sessions_) forgotten;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  forgotten.swap(sessions_);
}

std::optional<PeerInfo> Peers::linked(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  // The session goes on while one of its links has ended and the next one is not there yet.
  const auto it = sessions_.find(name);
  return it != sessions_.end() && !it->second->dead() ? std::optional(it->second->peer()) : std::nullopt;
}

std::optional<PeerInfo> Peers::linked(int rank) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, link] : links_) {
    if (link->closed() || link->incarnation() == 0) continue;
    if (auto peer = link->peer(); peer.rank == rank) return peer;
  }
  return std::nullopt;
}

}  // namespace tensorferry
