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

constexpr std::size_t most_handshakes = 256;  // connections in the handshake at once
constexpr std::chrono::seconds handshake_timeout{10};

class AgentAcceptor;

asio::awaitable<void> accept_unix(std::shared_ptr<AgentAcceptor> acceptor);
asio::awaitable<void> accept_tcp(std::shared_ptr<AgentAcceptor> acceptor);
asio::awaitable<void> handle_connection(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Socket> socket,
                                        bool local);
asio::awaitable<Status> run_handshake(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Socket> socket,
                                      bool local);

class AgentAcceptor final : public Acceptor, public std::enable_shared_from_this<AgentAcceptor> {
 public:
  explicit AgentAcceptor(const std::shared_ptr<Engine>& of)
      : engine(of), context(of->reactor->context()), unix_(context), tcp_(context) {}
  ~AgentAcceptor() override { remove_unix_socket(unix_address_); }

  Status open(Engine& of) {
    if (of.options.unix_sockets) {
      auto listener = listen_unix(of.options.socket_dir);
      if (!listener) return listener.status();
      unix_address_ = listener->address;
      of.record.unix_address = listener->address;
      unix_.assign(asio::local::stream_protocol(), listener->socket.release());
    }
    const auto address = listening_address(of.options.interface, of.options.reaches);
    if (!address) return address.status();
    if (!address->loopback && !of.own_key)
      return {Code::unauthenticated, "listening on " + address->address + " (" + address->interface +
                                         "), which other hosts can reach, needs a key of your own:\n  " +
                                         std::string(how_to_set_a_key())};
    const auto ports = parse_ports(of.options.ports);
    if (!ports) return ports.status();
    auto listener = listen_tcp(address->address, *ports);
    if (!listener) return listener.status();
    of.record.tcp_addresses = {join_host_port(address->address, listener->port)};
    const bool v6 = address->address.find(':') != std::string::npos;
    tcp_.assign(v6 ? asio::ip::tcp::v6() : asio::ip::tcp::v4(), listener->socket.release());
    return {};
  }

  void start() {
    if (unix_.is_open()) asio::co_spawn(context, accept_unix(shared_from_this()), asio::detached);
    asio::co_spawn(context, accept_tcp(shared_from_this()), asio::detached);
  }

  void stop() override {
    asio::post(context, [self = shared_from_this()] {
      error_code ignored;
      self->unix_.close(ignored);
      self->tcp_.close(ignored);
      for (const auto& socket : self->handshakes) socket->close(ignored);
      self->stopped = true;
    });
  }

  const std::weak_ptr<Engine> engine;
  asio::io_context& context;
  asio::local::stream_protocol::acceptor unix_;
  asio::ip::tcp::acceptor tcp_;
  std::list<std::shared_ptr<Socket>> handshakes;  // connections in the handshake, oldest first
  bool stopped = false;

 private:
  std::string unix_address_;
};

void begin_handshake(const std::shared_ptr<AgentAcceptor>& acceptor, Socket socket, bool local) {
  if (acceptor->stopped) return;  // stop() has run since the accept, and would not close this socket
  if (acceptor->handshakes.size() >= most_handshakes) {
    // Honest peers complete the handshake quickly, so the oldest connection makes room.
    error_code ignored;
    acceptor->handshakes.front()->close(ignored);
    acceptor->handshakes.pop_front();
  }
  auto shared = std::make_shared<Socket>(std::move(socket));
  acceptor->handshakes.push_back(shared);
  asio::co_spawn(acceptor->context, handle_connection(acceptor, std::move(shared), local), asio::detached);
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

asio::awaitable<void> accept_tcp(std::shared_ptr<AgentAcceptor> acceptor) {
  while (acceptor->tcp_.is_open()) {
    error_code error;
    auto socket = co_await acceptor->tcp_.async_accept(asio::redirect_error(asio::use_awaitable, error));
    if (!error) {
      socket.set_option(asio::ip::tcp::no_delay(true), error);
      begin_handshake(acceptor, std::move(socket), false);
    } else if (acceptor->tcp_.is_open()) {
      co_await pause(acceptor);
    }
  }
}

asio::awaitable<void> handle_connection(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Socket> socket,
                                        bool local) {
  asio::steady_timer timer(acceptor->context, handshake_timeout);
  timer.async_wait([socket](const error_code& cancelled) {
    error_code ignored;
    if (!cancelled) socket->close(ignored);
  });
  const auto status = co_await run_handshake(acceptor, socket, local);
  timer.cancel();
  acceptor->handshakes.remove(socket);
  const auto engine = acceptor->engine.lock();
  if (!status.ok() && engine && !engine->leaving)
    log_warning(std::string("refused a connection: transport=") + (local ? "unix " : "tcp ") + status.text());
}

asio::awaitable<Status> run_handshake(std::shared_ptr<AgentAcceptor> acceptor, std::shared_ptr<Socket> socket,
                                      bool local) {
  const auto engine = acceptor->engine.lock();
  if (!engine || engine->leaving) co_return Status(Code::agent_closed, "this agent is leaving");
  error_code error;
  auto token = asio::redirect_error(asio::use_awaitable, error);
  const auto cut = [&] {
    return Status(Code::connection_lost, "the connection ended during the handshake: " + error.message());
  };
  std::size_t got = 0;

  Terms terms;
  terms.key = &engine->key;
  terms.demands_proof = key_needed(local ? unix_peer_uid(socket->native_handle()) : std::nullopt, ::geteuid());
  terms.purpose = "link";
  terms.version_min = wire::version_min;
  terms.version_max = wire::version_max;
  AcceptorHandshake handshake(terms);
  std::array<std::byte, AcceptorHandshake::kHelloBytes> opening{};
  got = co_await asio::async_read(*socket, asio::buffer(opening), token);
  if (error == asio::error::eof && got == 0) co_return Status();  // a probe for a listener: not worth a warning
  if (error) co_return cut();
  const auto answer = handshake.answer(opening);
  if (!answer) co_return answer.status();
  co_await asio::async_write(*socket, asio::buffer(answer->bytes), token);
  if (!answer->verdict.ok()) co_return answer->verdict;
  if (error) co_return cut();
  Digest proof{};
  co_await asio::async_read(*socket, asio::buffer(proof), token);
  // The dialler checks the acceptor's proof first. If its key differs, it closes without sending a proof of its own.
  if (error == asio::error::eof && handshake.agreement().proven) co_return handshake.check(proof);
  if (error) co_return cut();
  if (auto status = handshake.check(proof); !status) co_return status;

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
  if (hello->expected != 0 && hello->expected != engine->self.incarnation) {
    co_return Status(Code::connection_lost, "\"" + hello->name + "\" expects an earlier incarnation of this agent");
  }
  FileDescriptor fd(socket->release(error));
  pollfd ended{fd.get(), POLLRDHUP, 0};
  const bool gone = ::poll(&ended, 1, 0) > 0;
  if ((ended.revents & (POLLHUP | POLLERR)) != 0) co_return Status();  // the dialler has closed it already
  std::shared_ptr<Link> link;
  do {  // a link that ends at this moment does not take the connection: try the link that replaces it
    link = engine->link_of(*hello, gone);
    if (!link) co_return Status(Code::connection_lost, "\"" + hello->name + "\" has given this connection up");
  } while (!link->attach(fd, local, false, *hello) && fd && link->closed() && !engine->leaving);
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
