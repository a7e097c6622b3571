// The accepting side of connect.h: coroutines on the reactor thread.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <list>
#include <memory>
#include <optional>
#include <utility>

#include "agent/dial/connect.h"
#include "agent/handshake/auth.h"
#include "agent/handshake/handshake_io.h"
#include "agent/handshake/strangers.h"
#include "agent/rendezvous/roster.h"
#include "agent/transport/address.h"
#include "agent/transport/network.h"
#include "agent/transport/socket_port.h"
#include "agent/transport/timer.h"
#include "base/log.h"
#include "base/out_of_memory.h"
#include "base/text.h"

namespace tensorferry {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr std::chrono::seconds handshake_timeout{10};
// Of a stranger. A dialler sends its first bytes at once, and its proof a round trip later.
constexpr std::chrono::seconds patience_with_silence{1};
constexpr std::chrono::seconds patience_with_proof{4};

class AgentAcceptor;

void begin_handshake(const std::shared_ptr<AgentAcceptor>& acceptor, std::unique_ptr<StreamPort> port);

/// A connection in the handshake.
struct Handshake {
  Handshake(asio::io_context& context, const Clock& of, std::unique_ptr<StreamPort> port)
      : clock(of), io(context, of, std::move(port)) {}

  /// Cuts the handshake off after `time`, unless called again before.
  void limit(std::chrono::seconds time) { io.set_deadline(clock.now() + time); }

  const Clock clock;
  HandshakeIo io;
  TlsPort* tls = nullptr;  // that of `io`; null: the connection is not to use TLS
  Strangers::Held place;   // null: the peer has proved itself
};

void accept_unix(const std::shared_ptr<AgentAcceptor>& acceptor);
void accept_tcp(const std::shared_ptr<AgentAcceptor>& acceptor, asio::ip::tcp::acceptor& tcp);
asio::awaitable<void> handle_connection(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Handshake> of);
asio::awaitable<Status> run_handshake(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Handshake> of);

class AgentAcceptor final : public Acceptor, public std::enable_shared_from_this<AgentAcceptor> {
 public:
  explicit AgentAcceptor(const std::shared_ptr<Engine>& of)
      : engine(of),
        context(of->reactor->context()),
        clock(of->clock),
        network(of->options.surroundings.network),
        tls(of->identity.tls),
        unix_(context) {}
  ~AgentAcceptor() override { remove_unix_socket(unix_address_); }

  Status open(Engine& of) {
    if (network) return listen_at_network(of);
    if (of.options.unix_sockets) {
      auto listener = listen_unix(of.options.socket_dir);
      if (!listener) return listener.status();
      unix_address_ = listener->address;
      of.identity.record.unix_address = listener->address;
      unix_.assign(asio::local::stream_protocol(), listener->socket.release());
    }
    const auto addresses = listening_addresses(of.options.interface, of.options.reaches);
    if (!addresses) return addresses.status();
    const auto ports = parse_ports(of.options.ports);
    if (!ports) return ports.status();
    of.identity.record.tcp_addresses.clear();
    for (const auto& address : *addresses) {
      if (of.identity.record.tcp_addresses.size() == Record::most_addresses) break;
      if (auto status = listen_on(of, address, *ports); !status) return status;
    }
    return {};
  }

  Status listen_at_network(Engine& of) {
    auto addresses = network->listen([weak = weak_from_this()](std::unique_ptr<StreamPort> port) {
      if (const auto self = weak.lock()) begin_handshake(self, std::move(port));
    });
    if (!addresses) return addresses.status();
    of.identity.record.tcp_addresses = std::move(*addresses);
    return {};
  }

  Status listen_on(Engine& of, const InterfaceAddress& address, PortRange ports) {
    if (!address.loopback && of.identity.key.empty())
      return {Code::unauthenticated, "listening on " + address.address + " (" + address.interface +
                                         "), which other hosts can reach, needs a key of your own:\n  " +
                                         std::string(how_to_set_a_key())};
    auto listener = listen_tcp(address.address, ports);
    if (!listener) return listener.status();
    of.identity.record.tcp_addresses.push_back(join_host_port(address.address, listener->port));
    const bool v6 = address.address.find(':') != std::string::npos;
    tcp_.emplace_back(context).assign(v6 ? asio::ip::tcp::v6() : asio::ip::tcp::v4(), listener->socket.release());
    return {};
  }

  void start() {
    if (unix_.is_open()) accept_unix(shared_from_this());
    for (auto& each : tcp_) accept_tcp(shared_from_this(), each);
  }

  void stop() override {
    asio::post(context, [self = shared_from_this()] {
      error_code ignored;
      self->unix_.close(ignored);
      for (auto& each : self->tcp_) each.close(ignored);
      self->strangers.close_all();
      for (const auto& one : self->proven) one->io.cut();
      if (self->network) self->network->stop_listening();
      self->stopped = true;
    });
  }

  const std::weak_ptr<Engine> engine;
  asio::io_context& context;
  const Clock clock;
  const std::shared_ptr<Network> network;
  const std::shared_ptr<Tls> tls;  // null: none
  asio::local::stream_protocol::acceptor unix_;
  std::list<asio::ip::tcp::acceptor> tcp_;  // one for each address; never changes after open()
  // Connections in the handshake: those that have to prove themselves and have not yet, and the others.
  Strangers strangers{places_for_strangers()};
  std::list<std::shared_ptr<Handshake>> proven;
  bool stopped = false;

 private:
  std::string unix_address_;
};

/// Marks the peer as one that has proved itself: no stranger pushes it out any more.
void prove(AgentAcceptor& acceptor, const std::shared_ptr<Handshake>& of) {
  if (of->place) acceptor.strangers.release(std::exchange(of->place, nullptr));
  of->limit(handshake_timeout);
  acceptor.proven.push_back(of);
}

void end_handshake(AgentAcceptor& acceptor, const std::shared_ptr<Handshake>& of) {
  if (of->place) acceptor.strangers.release(std::exchange(of->place, nullptr));
  acceptor.proven.remove(of);
}

void begin_handshake(const std::shared_ptr<AgentAcceptor>& acceptor, std::unique_ptr<StreamPort> port) {
  if (acceptor->stopped) return;  // stop() has run since the accept, and would not close this connection
  const int fd = port->descriptor();
  const bool local = port->local();
  TlsPort* tls = nullptr;
  if (const auto& with = acceptor->tls; with && !local) {
    auto secured = TlsPort::make(with, Side::acceptor, std::move(port));
    if (!secured) return log_warning("refused a connection: " + secured.status().text());
    tls = secured->get();
    port = std::move(*secured);
  }
  auto of = std::make_shared<Handshake>(acceptor->context, acceptor->clock, std::move(port));
  of->tls = tls;
  if (local && !key_needed(unix_peer_uid(fd), ::geteuid())) {
    prove(*acceptor, of);
  } else {
    of->limit(patience_with_silence);
    of->place = acceptor->strangers.admit(stranger_address(fd), [weak = std::weak_ptr(of)] {
      if (const auto alive = weak.lock()) alive->io.cut();
    });
  }
  asio::co_spawn(acceptor->context, handle_connection(acceptor, of), [acceptor, of](const std::exception_ptr& failure) {
    end_handshake(*acceptor, of);
    if (failure) log_warning("refused a connection: out of memory");
  });
}

/// Waits before the next accept after an error, so that accepting does not spin. If no descriptor is left, a stranger
/// gives up its own.
asio::awaitable<void> pause(std::shared_ptr<AgentAcceptor> acceptor) {
  if (acceptor->strangers.shed()) co_return;
  Timer timer(acceptor->context, acceptor->clock);
  co_await timer.wait_until(acceptor->clock.now() + std::chrono::milliseconds(20));
}

/// Accepts until the listener is closed, and passes each connection to `take`. An exception (no memory) costs the
/// connection at hand and ends nothing else.
template <class Listener, class Take>
void accept_all(const std::shared_ptr<AgentAcceptor>& acceptor, Listener& listener, Take take) {
  const auto loop = [](std::shared_ptr<AgentAcceptor> of, Listener& at, Take with) -> asio::awaitable<void> {
    while (at.is_open()) {
      error_code error;
      auto socket = co_await at.async_accept(asio::redirect_error(asio::use_awaitable, error));
      if (!error)
        with(std::move(socket));
      else if (at.is_open())
        co_await pause(of);
    }
  };
  asio::co_spawn(acceptor->context, loop(acceptor, listener, take),
                 [acceptor, &listener, take](const std::exception_ptr& failure) {
                   if (!failure) return;
                   log_warning("accepting connections: out of memory");
                   if (!out_of_memory::with_reserve([&] { accept_all(acceptor, listener, take); }))
                     log_warning("accepting connections: there is still no memory: this agent accepts no more");
                 });
}

void accept_unix(const std::shared_ptr<AgentAcceptor>& acceptor) {
  accept_all(acceptor, acceptor->unix_, [of = acceptor.get()](asio::local::stream_protocol::socket socket) {
    begin_handshake(of->shared_from_this(), std::make_unique<SocketPort>(FileDescriptor(socket.release()), true));
  });
}

void accept_tcp(const std::shared_ptr<AgentAcceptor>& acceptor, asio::ip::tcp::acceptor& tcp) {
  accept_all(acceptor, tcp, [of = acceptor.get()](asio::ip::tcp::socket socket) {
    error_code ignored;
    socket.set_option(asio::ip::tcp::no_delay(true), ignored);
    begin_handshake(of->shared_from_this(), std::make_unique<SocketPort>(FileDescriptor(socket.release()), false));
  });
}

/// `from`: the address of the other end; "": it has none.
void log_refused(bool local, const std::string& from, const Status& why) {
  log_warning(std::string("refused a connection: transport=") + (local ? "unix " : "tcp ") +
              (from.empty() ? "" : "from=" + from + " ") + why.text());
}

asio::awaitable<void> handle_connection(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Handshake> of) {
  const bool local = of->io.port().local();
  const auto from = peer_address(of->io.port().descriptor());
  const auto status = co_await run_handshake(acceptor, of);
  const auto engine = acceptor->engine.lock();
  if (!status.ok() && engine && !engine->leaving) log_refused(local, from, status);
}

/// Gives the connection to its link. On a pool thread, because messages that waited for it are sent there, and the link
/// that it replaces is closed.
void attach_apart(const std::shared_ptr<Engine>& engine, Connected connection) {
  engine->pool->submit([engine, connection = std::move(connection)]() mutable {
    const bool local = connection.port->local();
    const auto from = peer_address(connection.port->descriptor());
    const auto why = engine->peers.admit(std::move(connection));
    if (why.code() == Code::permission_denied) log_refused(local, from, why);
  });
}

/// Logs that another agent has the name or the rank of this one, if there is such an agent. Asks the store.
void tell_of_refused(Engine& engine) {
  if (engine.leaving) return;
  const auto& own = engine.identity.record;
  const auto other = engine.directory->take_refused(own.incarnation);
  if (!other) return;
  log_warning(
      formatted("{} was refused because it has the {} of this agent, {}: start each process with a name and a "
                "rank of its own, and each job with a store of its own",
                who(*other), other->name == own.name ? "name" : "rank", who(own)));
}

Status cut_off(const Status& why) {
  return {Code::connection_lost, "the connection ended during the handshake: " + std::string(why.what())};
}

/// Proves this side to the dialler, and has the dialler prove itself if it must. Nullopt: the peer has sent nothing, so
/// it is a probe for a listener, or a stranger: not worth a warning.
asio::awaitable<std::optional<Status>> shake_hands(AgentAcceptor& acceptor, const Engine& engine,
                                                   std::shared_ptr<Handshake> of) {
  auto& io = of->io;
  const int fd = io.port().descriptor();
  std::array<std::byte, AcceptorHandshake::hello_bytes> opening{};
  if (of->tls != nullptr) {
    const auto spoken = co_await io.readable();
    if (!spoken.ok() || !of->tls->heard()) co_return std::nullopt;
    if (of->place) of->limit(patience_with_proof);
    const auto secured = co_await io.secure(*of->tls);
    if (!secured.ok()) co_return secured;
  }
  const auto opened = co_await io.read_exactly(opening);
  if (!opened.ok() && io.received() == 0) co_return std::nullopt;
  if (!opened.ok()) co_return cut_off(opened);
  if (of->place && of->tls == nullptr) of->limit(patience_with_proof);

  const auto demands_proof = acceptor_demands_proof(fd, engine.identity.key);
  if (!demands_proof) co_return demands_proof.status();
  Terms terms;
  terms.key = &engine.identity.key;
  terms.demands_proof = *demands_proof;
  terms.purpose = "link";
  terms.version_min = wire::version_min;
  terms.version_max = wire::version_max;
  AcceptorHandshake handshake(terms);
  const auto answer = handshake.answer(opening);
  if (!answer) co_return answer.status();
  const auto answered = co_await io.write_all(answer->bytes);
  if (!answer->verdict.ok()) co_return why_refused(fd, engine.identity.key, answer->verdict);
  if (!answered.ok()) co_return cut_off(answered);
  Digest proof{};
  const auto proved = co_await io.read_exactly(proof);
  // The dialler checks the acceptor's proof first. If its key differs, it closes without sending a proof of its own. It
  // also closes when its attempt has taken too long, as on a slow path.
  if (!proved.ok() && io.closed_by_peer() && handshake.agreement().proven)
    co_return Status(Code::unauthenticated,
                     "the peer ended the handshake without a proof that it has the cluster key: it has another key, or "
                     "its attempt took too long. If it has another key: " +
                         std::string(how_to_set_a_key()));
  if (!proved.ok()) co_return cut_off(proved);
  if (auto status = handshake.check(proof); !status) co_return status;
  if (of->place) prove(acceptor, of);
  co_return Status();
}

asio::awaitable<Status> run_handshake(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Handshake> of) {
  auto& io = of->io;
  const auto engine = acceptor->engine.lock();
  if (!engine || engine->leaving) co_return Status(Code::agent_closed, "this agent is leaving");
  const auto shaken = co_await shake_hands(*acceptor, *engine, of);
  if (!shaken) co_return Status();
  if (!shaken->ok()) co_return *shaken;

  wire::Header header;
  header.kind = wire::Kind::hello;
  const auto mine = wire::assemble(header, {}, {}, encode(engine->hello(wire::Hello::Purpose::calls, 0, 0)));
  if (const auto sent = co_await io.write_all(mine); !sent.ok()) co_return cut_off(sent);
  Bytes head(wire::Header::size);
  const auto before = io.received();
  const auto headed = co_await io.read_exactly(head);
  // agent_answers() wanted our hello alone.
  if (!headed.ok() && io.closed_by_peer() && io.received() == before) {
    engine->pool->submit([engine] { tell_of_refused(*engine); });
    co_return Status();
  }
  if (!headed.ok()) co_return cut_off(headed);
  const auto theirs = wire::Header::decode(head);
  if (!theirs) co_return theirs.status();
  if (theirs->kind != wire::Kind::hello) co_return Status(Code::protocol_error, "the first frame is not a hello");
  Bytes body(theirs->length);
  if (const auto come = co_await io.read_exactly(body); !come.ok()) co_return cut_off(come);
  const auto hello = wire::Hello::decode(body);
  if (!hello) co_return hello.status();
  if (auto status = check_name(hello->name); !status)
    co_return Status(Code::protocol_error, std::string(status.what()));
  if (hello->expected != 0 && hello->expected != engine->identity.self.incarnation) {
    co_return Status(Code::connection_lost, "\"" + hello->name + "\" expects an earlier incarnation of this agent");
  }
  std::uint64_t number = 0;
  if (!decides(engine->identity.self, hello->incarnation, hello->purpose, false)) {
    const auto go = co_await read_go(io);
    if (!go.ok() && io.closed_by_peer()) co_return Status();  // another connection carries the calls
    if (!go.ok()) co_return cut_off(go.status());
    number = *go;
  }
  attach_apart(engine, {io.take_port(), *hello, false, number});
  co_return Status();
}

}  // namespace

Result<std::shared_ptr<Acceptor>> Acceptor::listen(const std::shared_ptr<Engine>& engine) {
  auto acceptor = std::make_shared<AgentAcceptor>(engine);
  if (auto status = acceptor->open(*engine); !status) return status;
  acceptor->start();
  return std::shared_ptr<Acceptor>(std::move(acceptor));
}

}  // namespace tensorferry
