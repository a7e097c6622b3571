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
#include "base/text.h"

namespace tensorferry {
namespace {

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

Result<Connected> dial_agent(Engine& engine, const Record& record, wire::Hello::Purpose purpose,
                             Clock::time_point deadline) {
  auto connected = reach(engine, record, deadline);
  if (!connected) return connected;
  if (connected->hello.incarnation != record.incarnation || connected->hello.name != record.name) {
    return Status(Code::connection_lost,
                  "another agent answers at the address of \"" + record.name + "\" (it has ended)");
  }
  const auto frame = hello_frame(engine.hello(purpose, record.incarnation));
  if (auto status = write_all(connected->socket.get(), frame, deadline); !status) return status;
  connected->hello.purpose = purpose;
  return connected;
}

bool agent_answers(Engine& engine, const Record& record) {
  const auto connected = reach(engine, record, Clock::now() + std::chrono::seconds(2));
  return connected.ok() && connected->hello.incarnation == record.incarnation;
}

void Engine::dial(std::shared_ptr<Link> link, wire::Hello::Purpose purpose) {
  const bool taken = pool->submit_long([engine = shared_from_this(), link, purpose] {
    while (!link->closed()) {
      // The directory waits for an absent peer only as long as the link's calls allow, and in short slices, because a
      // later call may allow less.
      auto found =
          engine->directory->find(link->peer().name, std::clamp(link->patience(), Milliseconds(0), Milliseconds(100)));
      Status why = found.status();
      if (found && link->incarnation() != 0 && link->incarnation() != found->incarnation) {
        return link->close({Code::connection_lost, "it was restarted"});
      }
      if (found) {
        auto connected = dial_agent(*engine, *found, purpose, Clock::now() + std::chrono::seconds(10));
        if (connected && link->attach(connected->socket, connected->local, true, connected->hello)) return;
        why = connected ? Status(Code::connection_lost, "the link refused the connection") : connected.status();
      }
      // A record signed with another key is permanent, so dialling stops. If the record is good and another key answers
      // at its address, a retry may succeed: another process has the port of a peer that has ended.
      const bool hopeless = found.status().code() == Code::unauthenticated;
      if (engine->leaving || hopeless) return link->close(why);
      if (link->unreachable(why)) return;
      std::this_thread::sleep_for(Milliseconds(20));
    }
  });
  if (!taken) link->close({Code::agent_closed, "the agent \"" + self.name + "\" was shut down"});
}

}  // namespace tensorferry
