// The accepting side of connect.h: coroutines on the reactor thread.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <list>

#include "agent/address.h"
#include "agent/connect.h"
#include "agent/link.h"
#include "base/log.h"

namespace tensorferry {
namespace {

namespace asio = boost::asio;
using Socket = asio::generic::stream_protocol::socket;
using boost::system::error_code;

constexpr std::size_t most_strangers = 256;  // connections at once that have to prove the key, and have not yet
constexpr std::chrono::seconds handshake_timeout{10};
// A stranger that is older makes room for another. A dialler sends its first bytes at once, and its proof a round trip
// later.
constexpr std::chrono::milliseconds patience_with_silence{500};
constexpr std::chrono::milliseconds patience_with_proof{4000};

class AgentAcceptor;

/// A connection in the handshake.
struct Handshake {
  std::shared_ptr<Socket> socket;
  bool local = false;
  bool silent = true;  // has sent nothing yet
  std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
};

asio::awaitable<void> accept_unix(std::shared_ptr<AgentAcceptor> acceptor);
asio::awaitable<void> accept_tcp(std::shared_ptr<AgentAcceptor> acceptor, asio::ip::tcp::acceptor& tcp);
asio::awaitable<void> handle_connection(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Handshake> of);
asio::awaitable<Status> run_handshake(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Handshake> of);

class AgentAcceptor final : public Acceptor, public std::enable_shared_from_this<AgentAcceptor> {
 public:
  explicit AgentAcceptor(const std::shared_ptr<Engine>& of)
      : engine(of), context(of->reactor->context()), unix_(context) {}
  ~AgentAcceptor() override { remove_unix_socket(unix_address_); }

  Status open(Engine& of) {
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

  Status listen_on(Engine& of, const InterfaceAddress& address, PortRange ports) {
    if (!address.loopback && !of.identity.own_key)
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
    if (unix_.is_open()) asio::co_spawn(context, accept_unix(shared_from_this()), asio::detached);
    for (auto& each : tcp_) asio::co_spawn(context, accept_tcp(shared_from_this(), each), asio::detached);
  }

  void stop() override {
    asio::post(context, [self = shared_from_this()] {
      error_code ignored;
      self->unix_.close(ignored);
      for (auto& each : self->tcp_) each.close(ignored);
      for (const auto* all : {&self->strangers, &self->proven}) {
        for (const auto& one : *all) one->socket->close(ignored);
      }
      self->stopped = true;
    });
  }

  const std::weak_ptr<Engine> engine;
  asio::io_context& context;
  asio::local::stream_protocol::acceptor unix_;
  std::list<asio::ip::tcp::acceptor> tcp_;  // one for each address; never changes after open()
  /// Returns the stranger that may make room for another connection; null: none.
  [[nodiscard]] std::shared_ptr<Handshake> outstayed() const {
    const auto now = std::chrono::steady_clock::now();
    for (const auto& one : strangers) {
      if (now - one->begun > (one->silent ? patience_with_silence : patience_with_proof)) return one;
    }
    return nullptr;
  }
  /// Returns whether there is room for another stranger. Closes one that has had its time if need be.
  bool make_room() {
    if (strangers.size() < most_strangers) return true;
    const auto oldest = outstayed();
    if (!oldest) return false;
    error_code ignored;
    oldest->socket->close(ignored);
    strangers.remove(oldest);
    return true;
  }

  // Connections in the handshake, oldest first: those that have to prove the key and have not yet, and the others.
  std::list<std::shared_ptr<Handshake>> strangers, proven;
  bool stopped = false;

 private:
  std::string unix_address_;
};

void begin_handshake(const std::shared_ptr<AgentAcceptor>& acceptor, Socket socket, bool local) {
  if (acceptor->stopped) return;  // stop() has run since the accept, and would not close this socket
  auto of = std::make_shared<Handshake>();
  of->local = local;
  of->socket = std::make_shared<Socket>(std::move(socket));
  const bool trusted = !key_needed(local ? unix_peer_uid(of->socket->native_handle()) : std::nullopt, ::geteuid());
  if (!trusted && !acceptor->make_room()) return;  // closes it: the dialler tries again
  (trusted ? acceptor->proven : acceptor->strangers).push_back(of);
  asio::co_spawn(acceptor->context, handle_connection(acceptor, std::move(of)), asio::detached);
}

/// Waits before the next accept after an error (no descriptor left, for example), so that accepting does not spin.
asio::awaitable<void> pause(std::shared_ptr<AgentAcceptor> acceptor) {
  asio::steady_timer timer(acceptor->context, std::chrono::milliseconds(20));
  error_code ignored;
  co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
}

asio::awaitable<void> accept_unix(std::shared_ptr<AgentAcceptor> acceptor) {
  while (acceptor->unix_.is_open()) {
    error_code error;
    auto socket = co_await acceptor->unix_.async_accept(asio::redirect_error(asio::use_awaitable, error));
    if (!error)
      begin_handshake(acceptor, std::move(socket), true);
    else if (acceptor->unix_.is_open())
      co_await pause(acceptor);
  }
}

asio::awaitable<void> accept_tcp(std::shared_ptr<AgentAcceptor> acceptor, asio::ip::tcp::acceptor& tcp) {
  while (tcp.is_open()) {
    if (!acceptor->make_room()) {  // the others wait in the listener's backlog
      co_await pause(acceptor);
      continue;
    }
    error_code error;
    auto socket = co_await tcp.async_accept(asio::redirect_error(asio::use_awaitable, error));
    if (!error) {
      socket.set_option(asio::ip::tcp::no_delay(true), error);
      begin_handshake(acceptor, std::move(socket), false);
    } else if (tcp.is_open()) {
      co_await pause(acceptor);
    }
  }
}

void log_refused(bool local, const Status& why) {
  log_warning(std::string("refused a connection: transport=") + (local ? "unix " : "tcp ") + why.text());
}

asio::awaitable<void> handle_connection(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Handshake> of) {
  asio::steady_timer timer(acceptor->context, handshake_timeout);
  timer.async_wait([socket = of->socket](const error_code& cancelled) {
    error_code ignored;
    if (!cancelled) socket->close(ignored);
  });
  const auto status = co_await run_handshake(acceptor, of);
  timer.cancel();
  acceptor->strangers.remove(of);
  acceptor->proven.remove(of);
  const auto engine = acceptor->engine.lock();
  if (!status.ok() && engine && !engine->leaving) log_refused(of->local, status);
}

/// Gives the connection to its link. On a pool thread, because messages that waited for it are sent there, and the link
/// that it replaces is closed.
void attach_apart(const std::shared_ptr<Engine>& engine, FileDescriptor socket, bool local, wire::Hello hello) {
  engine->pool->submit([engine, socket = std::move(socket), local, hello = std::move(hello)]() mutable {
    pollfd ended{socket.get(), POLLRDHUP, 0};
    const bool gone = ::poll(&ended, 1, 0) > 0;
    if ((ended.revents & (POLLHUP | POLLERR)) != 0) return;  // the dialler has closed it already
    std::shared_ptr<Link> link;
    do {  // a link that ends at this moment does not take the connection: try the link that replaces it
      link = engine->peers.link_of(hello, gone);
      if (!link) {
        const Status why(Code::connection_lost, "\"" + hello.name + "\" has given this connection up");
        return log_refused(local, why);
      }
    } while (!link->attach(socket, local, false, hello) && socket && link->closed() && !engine->leaving);
  });
}

asio::awaitable<Status> run_handshake(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Handshake> of) {
  const auto socket = of->socket;
  const bool local = of->local;
  const auto engine = acceptor->engine.lock();
  if (!engine || engine->leaving) co_return Status(Code::agent_closed, "this agent is leaving");
  error_code error;
  auto token = asio::redirect_error(asio::use_awaitable, error);
  const auto cut = [&] {
    return Status(Code::connection_lost, "the connection ended during the handshake: " + error.message());
  };
  std::size_t got = 0;

  Terms terms;
  terms.key = &engine->identity.key;
  terms.demands_proof = key_needed(local ? unix_peer_uid(socket->native_handle()) : std::nullopt, ::geteuid());
  terms.purpose = "link";
  terms.version_min = wire::version_min;
  terms.version_max = wire::version_max;
  AcceptorHandshake handshake(terms);
  std::array<std::byte, AcceptorHandshake::hello_bytes> opening{};
  got = co_await asio::async_read(*socket, asio::buffer(opening), token);
  if (error && got == 0) co_return Status();  // a probe for a listener, or a stranger: not worth a warning
  if (error) co_return cut();
  of->silent = false;
  const auto answer = handshake.answer(opening);
  if (!answer) co_return answer.status();
  co_await asio::async_write(*socket, asio::buffer(answer->bytes), token);
  if (!answer->verdict.ok()) co_return answer->verdict;
  if (error) co_return cut();
  Digest proof{};
  co_await asio::async_read(*socket, asio::buffer(proof), token);
  // The dialler checks the acceptor's proof first. If its key differs, it closes without sending a proof of its own. It
  // also closes when its attempt has taken too long, as on a slow path.
  if (error == asio::error::eof && handshake.agreement().proven)
    co_return Status(Code::unauthenticated,
                     "the peer ended the handshake without a proof that it has the cluster key: it has another key, or "
                     "its attempt took too long. If it has another key: " +
                         std::string(how_to_set_a_key()));
  if (error) co_return cut();
  if (auto status = handshake.check(proof); !status) co_return status;
  acceptor->strangers.remove(of);
  acceptor->proven.remove(of);
  acceptor->proven.push_back(of);

  wire::Header header;
  header.kind = wire::Kind::hello;
  const auto mine = wire::assemble(header, {}, {}, encode(engine->hello(wire::Hello::Purpose::calls, nullptr, 0)));
  co_await asio::async_write(*socket, asio::buffer(mine), token);
  if (error) co_return cut();
  Bytes head(wire::Header::size);
  got = co_await asio::async_read(*socket, asio::buffer(head), token);
  if (error == asio::error::eof && got == 0) co_return Status();  // agent_answers() wanted our hello alone
  if (error) co_return cut();
  const auto theirs = wire::Header::decode(head);
  if (!theirs) co_return theirs.status();
  if (theirs->kind != wire::Kind::hello) co_return Status(Code::protocol_error, "the first frame is not a hello");
  Bytes body(theirs->length);
  co_await asio::async_read(*socket, asio::buffer(body), token);
  if (error) co_return cut();
  const auto hello = wire::Hello::decode(body);
  if (!hello) co_return hello.status();
  if (auto status = check_name(hello->name); !status)
    co_return Status(Code::protocol_error, std::string(status.what()));
  if (hello->expected != 0 && hello->expected != engine->identity.self.incarnation) {
    co_return Status(Code::connection_lost, "\"" + hello->name + "\" expects an earlier incarnation of this agent");
  }
  attach_apart(engine, FileDescriptor(socket->release(error)), local, *hello);
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
