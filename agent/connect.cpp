#include "agent/connect.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "agent/address.h"
#include "agent/link.h"
#include "agent/rendezvous/blocking_io.h"
#include "base/log.h"
#include "base/text.h"

namespace tensorferry {
namespace {

constexpr std::chrono::seconds longest_bulk_dial{30};
constexpr Milliseconds head_start{200};

Terms terms_of(const Engine& engine, bool demands_proof) {
  Terms terms;
  terms.key = &engine.identity.key;
  terms.demands_proof = demands_proof;
  terms.purpose = "link";
  terms.version_min = wire::version_min;
  terms.version_max = wire::version_max;
  return terms;
}

Result<wire::Hello> read_hello(int fd, Clock::time_point deadline) {
  Bytes head(wire::Header::size);
  if (auto status = read_exactly(fd, head, deadline); !status) return status;
  const auto header = wire::Header::decode(head);
  if (!header) return header.status();
  if (header->kind != wire::Kind::hello) return Status(Code::protocol_error, "the first frame is not a hello");
  Bytes body(header->length);
  if (auto status = read_exactly(fd, body, deadline); !status) return status;
  return wire::Hello::decode(body);
}

Bytes hello_frame(const wire::Hello& hello) {
  wire::Header header;
  header.kind = wire::Kind::hello;
  return wire::assemble(header, {}, {}, encode(hello));
}

/// Connects to the addresses of one agent side by side: to the first one at once, and to each further one when all
/// before it have failed, or have not answered for a moment. So an address that drops packets costs little time.
class TcpRace {
 public:
  struct Winner {
    std::string address;
    FileDescriptor socket;
  };

  TcpRace(const std::vector<std::string>& addresses, Clock::time_point deadline)
      : addresses_(addresses), deadline_(deadline) {}

  /// Waits for the next connection that is made. Nullopt: all other addresses have failed, or the deadline has passed.
  std::optional<Winner> next() {
    while (!open_.empty() || begun_ < addresses_.size()) {
      const auto now = Clock::now();
      if (begun_ < addresses_.size() && (open_.empty() || now >= next_begin_)) {
        begin(addresses_[begun_++]);
        next_begin_ = now + alone_for;
      } else if (now >= deadline_) {
        for (const auto& each : open_) note(each.address, "no answer");
        silent_ = true;
        open_.clear();
        begun_ = addresses_.size();
      } else if (auto winner = wait(begun_ < addresses_.size() ? std::min(next_begin_, deadline_) : deadline_)) {
        return winner;
      }
    }
    return std::nullopt;
  }
  /// Returns what happened at the addresses so far; "": nothing went wrong.
  [[nodiscard]] const std::string& failures() const { return failures_; }
  /// Returns whether an address did not answer, so that another attempt may succeed.
  [[nodiscard]] bool silent() const { return silent_; }
  void note(const std::string& address, std::string_view what) {
    if (!failures_.empty()) failures_ += "; ";
    failures_ += address + ": " + std::string(what);
  }

 private:
  static constexpr Milliseconds alone_for{300};

  void begin(const std::string& address) {
    const auto where = split_host_port(address);
    if (!where) return note(address, where.status().what());
    auto socket = start_connect_tcp(where->host, where->port);
    if (socket) return open_.push_back({address, std::move(*socket)});
    // The kernel knows no route at the moment, or has no socket left.
    silent_ = silent_ || socket.status().code() != Code::invalid_argument;
    note(address, socket.status().what());
  }

  std::optional<Winner> wait(Clock::time_point until) {
    std::vector<pollfd> sockets;
    for (const auto& each : open_) sockets.push_back({each.socket.get(), POLLOUT, 0});
    const auto left = std::chrono::ceil<Milliseconds>(until - Clock::now()).count();
    if (::poll(sockets.data(), sockets.size(), static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000))) <= 0)
      return std::nullopt;
    for (std::size_t i = sockets.size(); i-- > 0;) {
      if (sockets[i].revents == 0) continue;
      auto made = std::move(open_[i]);
      open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
      int error = 0;
      socklen_t size = sizeof error;
      ::getsockopt(made.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      if (error == 0) return made;
      silent_ = silent_ || error != ECONNREFUSED;
      note(made.address, std::strerror(error));
    }
    return std::nullopt;
  }

  const std::vector<std::string>& addresses_;
  const Clock::time_point deadline_;
  std::size_t begun_ = 0;
  Clock::time_point next_begin_;
  std::vector<Winner> open_;  // not connected yet, in the order of the addresses
  std::string failures_;
  bool silent_ = false;
};

/// The error of a dial whose connection the listener took and did not answer: it has too many connections in the
/// handshake, and may answer another time.
Status refused_for_now(const Status& status) {
  const bool cut = status.code() == Code::connection_lost || status.code() == Code::deadline_exceeded;
  return cut ? Status(Code::resource_exhausted, std::string(status.what())) : status;
}

/// Completes the handshake on a new connection and reads the peer's hello. ResourceExhausted: refused for now.
Result<Connected> run_handshake(Engine& engine, FileDescriptor socket, bool local, Clock::time_point deadline) {
  const bool demand = dialler_demands_proof(socket.get(), engine.identity.key);
  const auto agreed = handshake_as_dialler(socket.get(), terms_of(engine, demand), deadline);
  if (!agreed) return refused_for_now(agreed.status());
  auto hello = read_hello(socket.get(), deadline);
  if (!hello) return refused_for_now(hello.status());
  return Connected{std::move(socket), local, std::move(*hello)};
}

/// Returns whether an agent runs on this kernel, in this network namespace.
bool in_this_network(const Engine& engine, const Record& record) {
  const auto& self = engine.identity.record;
  return record.boot_id == self.boot_id && record.net_namespace == self.net_namespace && record.net_namespace != 0;
}

/// Returns why an agent that answered is not the one of the record; Ok: it is.
Status check_answer(const Record& record, const wire::Hello& hello) {
  if (hello.incarnation == record.incarnation && hello.name == record.name) return {};
  return {Code::connection_lost, "another agent answers at the address of \"" + record.name + "\" (it has ended)"};
}

/// Connects to the agent, completes the handshake, and checks that it is the agent of the record. If one address fails
/// in any of this, goes on with the next: an address may lead to another host in this network than in the agent's own.
Result<Connected> reach(Engine& engine, const Record& record, Clock::time_point deadline, bool& may_answer) {
  may_answer = false;
  Status why(Code::connection_lost, "it has no address that this agent can use");
  const bool may_unix = engine.options.unix_sockets && may_share_unix(engine.identity.record, record);
  if (may_unix) {
    auto socket = connect_unix(record.unix_address);
    if (socket) {
      auto connected = run_handshake(engine, std::move(*socket), true, deadline);
      if (connected) why = check_answer(record, connected->hello);
      if (connected && why.ok()) return connected;
      if (!connected) why = connected.status();
      may_answer = why.code() == Code::resource_exhausted;
      return why;
    }
    why = socket.status();
    may_answer = why.code() == Code::resource_exhausted;  // many agents dial it at once
  }
  const auto unix_failure = why;
  TcpRace race(record.tcp_addresses, deadline);
  auto code = Code::connection_lost;
  while (auto winner = race.next()) {
    auto connected = run_handshake(engine, std::move(winner->socket), false, deadline);
    auto answer = connected ? check_answer(record, connected->hello) : connected.status();
    if (answer.ok()) return connected;
    // A living agent would have answered at its unix address: another process has the port of an agent that has ended.
    if (may_unix && answer.code() == Code::unauthenticated)
      answer = {Code::connection_lost, formatted("{}, but another process answers at {}: {}", unix_failure.what(),
                                                 winner->address, answer.what())};
    may_answer = may_answer || answer.code() == Code::resource_exhausted;
    if (answer.code() != Code::resource_exhausted) code = answer.code();
    race.note(winner->address, answer.what());
  }
  may_answer = may_answer || race.silent();
  if (race.failures().empty()) return why;
  return Status(code, race.failures());
}

}  // namespace

Result<Connected> dial_agent(Engine& engine, const Record& record, const Link& link, wire::Hello::Purpose purpose,
                             Clock::time_point deadline, bool& may_answer) {
  auto connected = reach(engine, record, deadline, may_answer);
  if (!connected) return connected;
  const auto frame = hello_frame(engine.hello(purpose, &link, record.incarnation));
  if (auto status = write_all(connected->socket.get(), frame, deadline); !status) return status;
  connected->hello.purpose = purpose;
  return connected;
}

bool agent_answers(Engine& engine, const Record& record) {
  bool may_answer = false;
  return reach(engine, record, Clock::now() + std::chrono::seconds(2), may_answer).ok();
}

bool has_ended(Engine& engine, const Record& record, bool earlier) {
  if (record.incarnation == engine.identity.self.incarnation) return false;
  if (!earlier && !in_this_network(engine, record)) return false;
  bool may_answer = false;
  const auto reached = reach(engine, record, Clock::now() + std::chrono::seconds(2), may_answer);
  return reached.status().code() == Code::connection_lost && !may_answer;
}

bool listener_is_gone(const Engine& engine, const Record& record) {
  const bool same = in_this_network(engine, record) && !record.tcp_addresses.empty();
  const auto refuses = [](const std::string& address) {
    const auto where = split_host_port(address);
    if (!where) return false;
    auto socket = start_connect_tcp(where->host, where->port);
    if (!socket) return false;
    if (!wait_for_socket(socket->get(), POLLOUT, Clock::now() + std::chrono::seconds(1)).ok()) return false;
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(socket->get(), SOL_SOCKET, SO_ERROR, &error, &size);
    return error == ECONNREFUSED;
  };
  return same && std::all_of(record.tcp_addresses.begin(), record.tcp_addresses.end(), refuses);
}

namespace {

using Purpose = wire::Hello::Purpose;

/// Looks the peer of a session up again, and keeps its addresses. Returns why the peer is dead; Ok: no sign of that,
/// also if the store does not answer.
Status look_up(Engine& engine, Session& session) {
  if (session.process_ended()) return session.end_of_process(engine.identity.record.host);
  const auto found = engine.directory->find(session.peer().name, Milliseconds(0));
  if (found.status().code() == Code::not_found) return {Code::connection_lost, "it left the job"};
  if (!found) return {};
  if (found->incarnation != session.peer().incarnation) return {Code::connection_lost, "it was restarted"};
  session.set_record(*found);
  if (listener_is_gone(engine, *found)) {
    return process_has_ended(found->pid, found->host);
  }
  if (Clock::now() - session.last_heard() > engine.options.peer_timeout) {
    return {Code::connection_lost,
            formatted("it could not be reached for {} s",
                      std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - session.last_heard()).count())};
  }
  return {};
}

/// Waits between attempts to dial: 20 ms at first, twice as long each time, 1 s at most.
class Backoff {
 public:
  void wait() {
    std::this_thread::sleep_for(next_);
    next_ = std::min(2 * next_, Milliseconds(1000));
  }

 private:
  Milliseconds next_{20};
};

/// One thread's attempts to dial one connection of a link.
struct Dialling {
  const std::shared_ptr<Link>& link;
  const Purpose purpose;
  const Clock::time_point since = Clock::now();
  int attempts = 0;

  /// Returns how long the next attempt may take. The first ones are short: on a path that was cut, a new connection is
  /// made sooner than TCP would repeat its first packet.
  Milliseconds next_patience(bool session) {
    return std::min(Milliseconds(3000) * ++attempts, Milliseconds(session ? 5000 : 10000));
  }
};

Status dial_and_attach(Engine& engine, Link& link, const Record& record, Purpose purpose, Milliseconds patience,
                       bool& may_answer) {
  std::string addresses;
  for (const auto& address : record.tcp_addresses) addresses += (addresses.empty() ? "" : ", ") + address;
  link.connections().note_dial("connecting to " + addresses);
  auto connected = dial_agent(engine, record, link, purpose, Clock::now() + patience, may_answer);
  // Not whether the link takes the connection: if it has ended meanwhile, the next one must not think the peer hard to
  // dial, and ask it to dial at the same time.
  if (const auto session = link.session()) session->note_dial(connected.ok());
  if (!connected) {
    link.connections().note_dial(std::string(connected.status().what()));
    return connected.status();
  }
  if (link.attach(connected->socket, connected->local, true, connected->hello)) return {};
  return {Code::connection_lost, "the link refused the connection"};
}

/// Dials a peer of which no incarnation is known. True: attached, or the link has been closed.
bool dial_stranger(Engine& engine, Dialling& dialling) {
  const auto& link = dialling.link;
  // The directory waits for an absent peer only as long as the link's calls allow, and in short slices, because a later
  // call may allow less.
  const auto patience = std::clamp(link->connections().patience(), Milliseconds(0), Milliseconds(100));
  const auto found = engine.directory->find(link->peer().name, patience);
  Status why = found.status();
  bool may_answer = false;
  if (found) {
    why = dial_and_attach(engine, *link, *found, dialling.purpose, dialling.next_patience(false), may_answer);
    if (why.ok()) {
      link->session()->set_record(*found);
      return true;
    }
    if (why.code() == Code::connection_lost && listener_is_gone(engine, *found))
      why = process_has_ended(found->pid, found->host);
  }
  // A record signed with another key is permanent, so dialling stops. If the record is good and another key answers at
  // its address, a retry may succeed: another process has the port of a peer that has ended.
  const bool hopeless = found.status().code() == Code::unauthenticated;
  if (engine.leaving || hopeless) {
    link->close(why);
    return true;
  }
  const bool refused = why.code() == Code::resource_exhausted;  // for now
  return link->unreachable(refused ? Status(Code::connection_lost, std::string(why.what())) : why,
                           may_answer && Clock::now() - dialling.since < engine.options.peer_timeout);
}

/// Dials the peer of a session. True: attached, or given up.
bool dial_known(Engine& engine, Dialling& dialling, const std::shared_ptr<Session>& session) {
  const auto& link = dialling.link;
  if (!session->record()) (void)look_up(engine, *session);
  // Another connection can carry the request to be dialled, so this side does not wait long for its own attempt.
  const bool alone = !link->connections().connected();
  // If this side could not dial the peer before, the peer dials in the meantime.
  if (!alone && session->is_hard_to_dial()) (void)link->connections().ask_to_dial(dialling.purpose);
  Status why(Code::connection_lost, "its record cannot be read from the store");
  if (const auto record = session->record()) {
    bool may_answer = false;
    why = dial_and_attach(engine, *link, *record, dialling.purpose,
                          alone ? dialling.next_patience(true) : Milliseconds(2000), may_answer);
    if (why.ok()) return true;
  }
  if (engine.leaving) return true;
  if (!alone && link->connections().ask_to_dial(dialling.purpose)) return false;
  const auto dead = look_up(engine, *session);
  if (dead.ok()) return false;
  engine.peers.bury(session, dead);
  if (link->connections().leave_session(*session)) return false;
  link->close(dead, Loss::peer);
  return true;
}

}  // namespace

void Engine::dial(std::shared_ptr<Link> link, Purpose purpose) {
  const bool taken = pool->submit_long([engine = shared_from_this(), link, purpose] {
    Backoff backoff;
    Dialling dialling{link, purpose};
    const auto since = dialling.since;
    // If both agents of a session dialled its next link at once, each could take a connection of a link that the other
    // has just given up. So one of them goes first, and the other one dials when it has been dialled, or after a while.
    const auto lost = link->session();
    const bool second = lost && engine->identity.self.incarnation < lost->peer().incarnation;
    while (second && !link->connections().connected() && !link->closed() && Clock::now() < since + head_start)
      std::this_thread::sleep_for(Milliseconds(1));
    while (link->connections().keep_dialling(purpose)) {
      const auto session = link->session();
      if (session ? dial_known(*engine, dialling, session) : dial_stranger(*engine, dialling)) return;
      if (purpose == Purpose::bulk && Clock::now() - since > longest_bulk_dial) {
        // The peer waits for bytes that cannot come, so their calls could not end otherwise.
        if (!link->connections().awaits_bulk()) return;
        return link->close(
            {Code::connection_lost, formatted("neither agent could dial the bulk connection to \"{}\" in {} s",
                                              link->peer().name, longest_bulk_dial.count())});
      }
      backoff.wait();
    }
  });
  if (!taken) link->close({Code::agent_closed, "the agent \"" + identity.self.name + "\" was shut down"});
}

void Engine::dial_back(std::shared_ptr<Link> link, Purpose purpose) {
  const auto job = [engine = shared_from_this(), link, purpose] {
    if (const auto session = link->session()) {
      if (!session->record()) (void)look_up(*engine, *session);
      if (const auto known = session->record()) {
        bool may_answer = false;
        const auto dialled = dial_and_attach(*engine, *link, *known, purpose, Milliseconds(10000), may_answer);
        if (!dialled.ok()) log_warning("peer=" + link->peer().name + " asked to be dialled: " + dialled.text());
      }
    }
    link->connections().dialled_back(purpose);
  };
  if (!pool->submit_long(job)) link->connections().dialled_back(purpose);
}

}  // namespace tensorferry
