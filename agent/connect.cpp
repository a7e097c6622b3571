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
  terms.key = &engine.key;
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

Result<FileDescriptor> connect_tcp(const std::string& address, Clock::time_point deadline) {
  const auto where = split_host_port(address);
  if (!where) return where.status();
  auto socket = start_connect_tcp(where->host, where->port);
  if (!socket) return socket.status();
  if (auto status = wait_for_socket(socket->get(), POLLOUT, deadline); !status) return status;
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket->get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return Status(Code::connection_lost, address + ": " + std::strerror(error));
  return socket;
}

/// Completes the handshake on a new connection and reads the peer's hello.
Result<Connected> run_handshake(Engine& engine, FileDescriptor socket, bool local, Clock::time_point deadline) {
  const bool demand = key_needed(local ? unix_peer_uid(socket.get()) : std::nullopt, ::geteuid());
  const auto agreed = handshake_as_dialler(socket.get(), terms_of(engine, demand), deadline);
  if (!agreed) return agreed.status();
  auto hello = read_hello(socket.get(), deadline);
  if (!hello) return hello.status();
  return Connected{std::move(socket), local, std::move(*hello)};
}

/// Connects to the first address of the agent that accepts, and completes the handshake there.
Result<Connected> reach(Engine& engine, const Record& record, Clock::time_point deadline) {
  Status why(Code::connection_lost, "it has no address that this agent can use");
  const bool may_unix = engine.options.unix_sockets && may_share_unix(engine.record, record);
  if (may_unix) {
    auto socket = connect_unix(record.unix_address);
    if (socket) return run_handshake(engine, std::move(*socket), true, deadline);
    why = socket.status();
  }
  for (const auto& address : record.tcp_addresses) {
    auto socket = connect_tcp(address, deadline);
    if (!socket) {
      why = socket.status();
      continue;
    }
    auto connected = run_handshake(engine, std::move(*socket), false, deadline);
    if (connected || !may_unix || connected.status().code() != Code::unauthenticated) return connected;
    // A living agent would have answered at its unix address: another process has the port of an agent that has ended.
    return Status(Code::connection_lost, formatted("{}, but another process answers at {}: {}", why.what(), address,
                                                   connected.status().what()));
  }
  return why;
}

}  // namespace

Result<Connected> dial_agent(Engine& engine, const Record& record, const Link& link, wire::Hello::Purpose purpose,
                             Clock::time_point deadline) {
  auto connected = reach(engine, record, deadline);
  if (!connected) return connected;
  if (connected->hello.incarnation != record.incarnation || connected->hello.name != record.name) {
    return Status(Code::connection_lost,
                  "another agent answers at the address of \"" + record.name + "\" (it has ended)");
  }
  const auto frame = hello_frame(engine.hello(purpose, &link, record.incarnation));
  if (auto status = write_all(connected->socket.get(), frame, deadline); !status) return status;
  connected->hello.purpose = purpose;
  return connected;
}

bool agent_answers(Engine& engine, const Record& record) {
  const auto connected = reach(engine, record, Clock::now() + std::chrono::seconds(2));
  return connected.ok() && connected->hello.incarnation == record.incarnation;
}

namespace {

using Purpose = wire::Hello::Purpose;

/// Returns whether no process listens at the addresses of an agent of this kernel and network namespace: the agent's
/// process has ended then, because its listener lives as long as it does.
bool listener_is_gone(const Engine& engine, const Record& record) {
  const auto& self = engine.record;
  const bool same = record.boot_id == self.boot_id && record.net_namespace == self.net_namespace &&
                    record.net_namespace != 0 && !record.tcp_addresses.empty();
  if (!same) return false;
  const auto where = split_host_port(record.tcp_addresses.front());
  if (!where) return false;
  auto socket = start_connect_tcp(where->host, where->port);
  if (!socket) return false;
  if (!wait_for_socket(socket->get(), POLLOUT, Clock::now() + std::chrono::seconds(1)).ok()) return false;
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket->get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error == ECONNREFUSED;
}

/// Looks the peer of a session up again, and keeps its addresses. Returns why the peer is dead; Ok: no sign of that,
/// also if the store does not answer.
Status look_up(Engine& engine, Session& session) {
  if (session.process_ended()) return {Code::connection_lost, "its process has ended"};
  const auto found = engine.directory->find(session.peer().name, Milliseconds(0));
  if (found.status().code() == Code::not_found) return {Code::connection_lost, "it left the job"};
  if (!found) return {};
  if (found->incarnation != session.peer().incarnation) return {Code::connection_lost, "it was restarted"};
  session.set_record(*found);
  if (listener_is_gone(engine, *found)) {
    return {Code::connection_lost, "no process listens at " + found->tcp_addresses.front() + " any more"};
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

Status dial_and_attach(Engine& engine, Link& link, const Record& record, Purpose purpose, Milliseconds patience) {
  auto connected = dial_agent(engine, record, link, purpose, Clock::now() + patience);
  if (!connected) return connected.status();
  if (link.attach(connected->socket, connected->local, true, connected->hello)) return {};
  return {Code::connection_lost, "the link refused the connection"};
}

/// Dials a peer of which no incarnation is known. True: attached, or the link has been closed.
bool dial_stranger(Engine& engine, const std::shared_ptr<Link>& link, Purpose purpose) {
  // The directory waits for an absent peer only as long as the link's calls allow, and in short slices, because a later
  // call may allow less.
  const auto patience = std::clamp(link->patience(), Milliseconds(0), Milliseconds(100));
  const auto found = engine.directory->find(link->peer().name, patience);
  Status why = found.status();
  if (found) {
    why = dial_and_attach(engine, *link, *found, purpose, Milliseconds(10000));
    if (why.ok()) {
      link->session()->set_record(*found);
      return true;
    }
  }
  // A record signed with another key is permanent, so dialling stops. If the record is good and another key answers at
  // its address, a retry may succeed: another process has the port of a peer that has ended.
  const bool hopeless = found.status().code() == Code::unauthenticated;
  if (engine.leaving || hopeless) {
    link->close(why);
    return true;
  }
  return link->unreachable(why);
}

/// Dials the peer of a session. True: attached, or given up.
bool dial_known(Engine& engine, const std::shared_ptr<Link>& link, const std::shared_ptr<Session>& session,
                Purpose purpose) {
  if (!session->record()) (void)look_up(engine, *session);
  // Another connection can carry the request to be dialled, so this side does not wait long for its own attempt.
  const bool alone = !link->connected();
  Status why(Code::connection_lost, "its record cannot be read from the store");
  if (const auto record = session->record()) {
    why = dial_and_attach(engine, *link, *record, purpose, Milliseconds(alone ? 10000 : 2000));
    if (why.ok()) return true;
  }
  if (engine.leaving) return true;
  if (!alone && link->ask_to_dial(purpose)) return false;
  const auto dead = look_up(engine, *session);
  if (dead.ok()) return false;
  engine.bury(session, dead);
  if (link->leave_session(*session)) return false;
  link->close(dead, Loss::peer);
  return true;
}

}  // namespace

void Engine::dial(std::shared_ptr<Link> link, Purpose purpose) {
  const bool taken = pool->submit_long([engine = shared_from_this(), link, purpose] {
    Backoff backoff;
    const auto since = Clock::now();
    // If both agents of a session dialled its next link at once, each could take a connection of a link that the other
    // has just given up. So one of them goes first, and the other one dials when it has been dialled, or after a while.
    const auto lost = link->session();
    const bool second = lost && engine->self.incarnation < lost->peer().incarnation;
    while (second && !link->connected() && !link->closed() && Clock::now() < since + head_start)
      std::this_thread::sleep_for(Milliseconds(1));
    while (link->keep_dialling(purpose)) {
      const auto session = link->session();
      if (session ? dial_known(*engine, link, session, purpose) : dial_stranger(*engine, link, purpose)) return;
      if (purpose == Purpose::bulk && Clock::now() - since > longest_bulk_dial) {
        return link->give_up_bulk(
            {Code::connection_lost, formatted("neither agent could dial the bulk connection to \"{}\" in {} s",
                                              link->peer().name, longest_bulk_dial.count())});
      }
      backoff.wait();
    }
  });
  if (!taken) link->close({Code::agent_closed, "the agent \"" + self.name + "\" was shut down"});
}

void Engine::dial_back(std::shared_ptr<Link> link, Purpose purpose) {
  const auto job = [engine = shared_from_this(), link, purpose] {
    if (const auto session = link->session()) {
      if (!session->record()) (void)look_up(*engine, *session);
      if (const auto known = session->record()) {
        const auto dialled = dial_and_attach(*engine, *link, *known, purpose, Milliseconds(10000));
        if (!dialled.ok()) log_warning("peer=" + link->peer().name + " asked to be dialled: " + dialled.text());
      }
    }
    link->dialled_back(purpose);
  };
  if (!pool->submit_long(job)) link->dialled_back(purpose);
}

}  // namespace tensorferry
