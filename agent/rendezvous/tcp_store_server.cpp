// The server of the built-in store. One thread runs all coroutines: one accepts, and one serves each connection. So the
// table needs no lock, and a misbehaving connection ends its own coroutine alone.

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <list>
#include <map>
#include <thread>
#include <unordered_map>

#include "agent/handshake/auth.h"
#include "agent/handshake/handshake_io.h"
#include "agent/handshake/strangers.h"
#include "agent/rendezvous/store_protocol.h"
#include "agent/rendezvous/tcp_store.h"
#include "agent/transport/address.h"
#include "agent/transport/socket_port.h"
#include "agent/transport/tls_port.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/text.h"
#include "base/threads.h"

namespace tensorferry {

namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using std::chrono::milliseconds;

constexpr auto awaiting = asio::as_tuple(asio::use_awaitable);
// Bounds the wait of one get(), so that the wait of a dead client ends. A living client asks again.
constexpr milliseconds longest_wait{30000};
// Of a client that has not proved itself: until its first bytes, and then until its proof.
constexpr milliseconds patience_with_silence{1000}, patience_with_proof{4000};

/// The keys, their values, and the timers of the coroutines that wait for a key. Used on the server's thread alone.
class Table {
 public:
  explicit Table(TcpStoreBounds bounds) : bounds_(bounds) {}

  Status set(std::string_view key, ByteView value) {
    const auto found = values_.find(std::string(key));
    const auto before = found == values_.end() ? 0 : key.size() + found->second.size();
    const auto after = key.size() + value.size();
    if (auto status = check_bounds(found == values_.end(), bytes_ - before + after); !status) return status;
    bytes_ = bytes_ - before + after;
    values_.insert_or_assign(std::string(key), Bytes(value.begin(), value.end()));
    const auto [first, last] = waiters_.equal_range(std::string(key));
    for (auto one = first; one != last; ++one) one->second->cancel();
    return {};
  }

  [[nodiscard]] const Bytes* find(std::string_view key) const {
    const auto found = values_.find(std::string(key));
    return found == values_.end() ? nullptr : &found->second;
  }

  Result<std::int64_t> add(std::string_view key, std::int64_t amount) {
    auto found = counters_.find(std::string(key));
    if (found == counters_.end() && amount == 0) return 0;
    if (found == counters_.end()) {
      const auto after = bytes_ + key.size() + sizeof amount;
      if (auto status = check_bounds(true, after); !status) return status;
      bytes_ = after;
      found = counters_.emplace(std::string(key), 0).first;
    }
    // Unsigned, so that a sum that overflows wraps and is not undefined behaviour.
    found->second =
        static_cast<std::int64_t>(static_cast<std::uint64_t>(found->second) + static_cast<std::uint64_t>(amount));
    return found->second;
  }

  void erase(std::string_view key) {
    if (const auto found = values_.find(std::string(key)); found != values_.end()) {
      bytes_ -= key.size() + found->second.size();
      values_.erase(found);
    }
    if (counters_.erase(std::string(key)) != 0) bytes_ -= key.size() + sizeof(std::int64_t);
  }

  /// Registers a timer for a key: as long as the Waiter exists, set() of the key cancels the timer.
  class Waiter {
   public:
    Waiter(Table& table, const std::string& key, asio::steady_timer& timer)
        : table_(table), at_(table.waiters_.emplace(key, &timer)) {}
    ~Waiter() { table_.waiters_.erase(at_); }
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

   private:
    Table& table_;
    std::multimap<std::string, asio::steady_timer*>::iterator at_;
  };

 private:
  Status check_bounds(bool new_key, std::size_t bytes_after) const {
    if ((new_key && values_.size() + counters_.size() >= bounds_.keys) || bytes_after > bounds_.bytes) {
      return {Code::resource_exhausted,
              formatted("the store is full: {} of {} keys, {} of {} bytes", values_.size() + counters_.size(),
                        bounds_.keys, bytes_, bounds_.bytes)};
    }
    return {};
  }

  const TcpStoreBounds bounds_;
  std::unordered_map<std::string, Bytes> values_;
  std::unordered_map<std::string, std::int64_t> counters_;
  std::multimap<std::string, asio::steady_timer*> waiters_;
  std::size_t bytes_ = 0;
};

/// A connection of a client. If the client stops in the middle of a message, the connection fails.
class StoreConnection {
 public:
  /// `secured`: whether `port` is a TlsPort, whose handshake comes next.
  StoreConnection(asio::io_context& context, std::unique_ptr<StreamPort> port, TlsPort* secured)
      : tls(secured), peer(peer_address(port->descriptor())), io(context, Clock(), std::move(port)) {}

  void limit(milliseconds time) { io.set_deadline(Clock().now() + time); }
  void unlimited() { io.set_deadline(Clock::time_point::max()); }

  TlsPort* const tls;  // null: no TLS
  const std::string peer;
  HandshakeIo io;
};

class Server final : public TcpStoreServer {
 public:
  Server(Key key, std::shared_ptr<Tls> tls, TcpStoreBounds bounds)
      : key_(std::move(key)), tls_(std::move(tls)), bounds_(bounds), table_(bounds) {}
  ~Server() override;

  Status start(TcpListener listener);
  [[nodiscard]] std::uint16_t port() const override { return port_; }

 private:
  void keep_accepting(std::shared_ptr<tcp::acceptor> acceptor);
  asio::awaitable<void> accept_all(std::shared_ptr<tcp::acceptor> acceptor);
  std::shared_ptr<StoreConnection> connection_over(tcp::socket socket);
  asio::awaitable<void> serve(std::shared_ptr<StoreConnection> session);
  asio::awaitable<Status> run_handshake(std::shared_ptr<StoreConnection> session);
  static Status cut_off(const Status& why);
  asio::awaitable<Status> serve_one(std::shared_ptr<StoreConnection> session);
  asio::awaitable<Bytes> answer(store_protocol::StoreRequest request);

  const Key key_;
  const std::shared_ptr<Tls> tls_;  // null: none
  const TcpStoreBounds bounds_;
  const std::uint32_t forks_ = forks();
  std::uint16_t port_ = 0;
  Table table_;
  Strangers strangers_{places_for_strangers()};
  std::size_t connections_ = 0;
  std::thread thread_;
  // The last member, because its destructor destroys the remaining coroutines, which use the members above.
  std::unique_ptr<asio::io_context> io_ = std::make_unique<asio::io_context>(1);
};

Status Server::start(TcpListener listener) {
  port_ = listener.port;
  tcp::acceptor acceptor(*io_);
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  ::getsockname(listener.socket.get(), reinterpret_cast<sockaddr*>(&bound), &size);
  error_code error;
  acceptor.assign(bound.ss_family == AF_INET6 ? tcp::v6() : tcp::v4(), listener.socket.get(), error);
  if (error) return {Code::internal, formatted("the store's listener: {}", error.message())};
  static_cast<void>(listener.socket.release());
  keep_accepting(std::make_shared<tcp::acceptor>(std::move(acceptor)));

  thread_ = start_thread([this] { io_->run(); });
  return {};
}

Server::~Server() {
  if (forks_ != forks()) {  // in a forked child: no thread, and its io_context may be in the middle of a change
    thread_.detach();
    static_cast<void>(io_.release());
    return;
  }
  io_->stop();
  if (thread_.joinable()) thread_.join();
}

/// Accepts for as long as the server lives. An exception (no memory) costs the connection at hand.
void Server::keep_accepting(std::shared_ptr<tcp::acceptor> acceptor) {
  co_spawn(*io_, accept_all(acceptor), [this, acceptor](const std::exception_ptr& failure) {
    if (!failure) return;
    log_warning(formatted("store port={}: accepting: out of memory", port_));
    keep_accepting(acceptor);
  });
}

asio::awaitable<void> Server::accept_all(std::shared_ptr<tcp::acceptor> acceptor) {
  for (;;) {
    auto [error, socket] = co_await acceptor->async_accept(awaiting);
    if (error) {  // usually no descriptor is left: a stranger gives up its own, else wait until a connection closes
      if (strangers_.shed()) continue;
      log_warning(formatted("store port={}: accepting: {}", port_, error.message()));
      asio::steady_timer pause(*io_, milliseconds(200));
      co_await pause.async_wait(awaiting);
      continue;
    }
    if (connections_ - strangers_.size() >= bounds_.connections) {
      log_warning(formatted("store port={}: refused a client, because {} are connected", port_, connections_));
      continue;
    }
    const auto session = connection_over(std::move(socket));
    if (!session) continue;
    ++connections_;
    co_spawn(*io_, serve(session), [this](const std::exception_ptr& failure) {
      --connections_;
      if (failure) log_warning(formatted("store port={}: out of memory for a client", port_));
    });
  }
}

/// Returns null if there is no memory.
std::shared_ptr<StoreConnection> Server::connection_over(tcp::socket socket) {
  error_code ignored;
  socket.set_option(tcp::no_delay(true), ignored);
  socket.set_option(asio::socket_base::keep_alive(true), ignored);  // ends connections whose host has gone
  socket.non_blocking(true, ignored);
  std::unique_ptr<StreamPort> port = std::make_unique<SocketPort>(FileDescriptor(socket.release()), false);
  if (!tls_) return std::make_shared<StoreConnection>(*io_, std::move(port), nullptr);
  auto secured = TlsPort::make(tls_, Side::acceptor, std::move(port));
  if (!secured) return nullptr;
  auto* const tls = secured->get();
  return std::make_shared<StoreConnection>(*io_, std::move(*secured), tls);
}

asio::awaitable<void> Server::serve(std::shared_ptr<StoreConnection> session) {
  session->limit(patience_with_silence);
  const auto place =
      strangers_.admit(stranger_address(session->io.port().descriptor()), [weak = std::weak_ptr(session)] {
        if (const auto alive = weak.lock()) alive->io.cut();
      });
  auto status = co_await run_handshake(session);
  strangers_.release(place);
  session->unlimited();
  while (status) {
    auto next = co_await serve_one(session);
    status = std::move(next);
  }
  // Logs a client that broke the protocol, was too slow or did not know the key, but not one that just left.
  if (status.code() == Code::connection_lost) co_return;
  log_warning(formatted("store port={} peer={}: closed: {}", port_, session->peer, status.text()));
}

/// A client that stops in the middle of a message is to be logged. One that has left is not: ConnectionLost.
Status Server::cut_off(const Status& why) {
  if (why.code() != Code::deadline_exceeded) return why;
  return {Code::deadline_exceeded, "the client stopped in the middle of a message"};
}

asio::awaitable<Status> Server::run_handshake(std::shared_ptr<StoreConnection> session) {
  auto& io = session->io;
  const int fd = io.port().descriptor();
  if (session->tls != nullptr) {
    const auto spoken = co_await io.readable();
    if (!spoken.ok()) co_return cut_off(spoken);
    session->limit(patience_with_proof);
    const auto secured = co_await io.secure(*session->tls);
    if (!secured.ok()) co_return cut_off(secured);
  }
  std::array<std::byte, AcceptorHandshake::hello_bytes> hello;
  // Reads the magic first: a peer of another protocol may send fewer bytes than a preamble has.
  const auto begun = co_await io.read_exactly(std::span(hello).first(4));
  if (!begun.ok()) co_return cut_off(begun);
  if (text_of(ByteView(hello).first(4)) != "TFRY" && !is_tls(ByteView(hello).first(4))) {
    co_return Status(Code::protocol_error, "the client does not speak the tensorferry protocol");
  }
  const auto opened = co_await io.read_exactly(std::span(hello).subspan(4));
  if (!opened.ok()) co_return cut_off(opened);
  session->limit(patience_with_proof);
  const auto demands_proof = acceptor_demands_proof(fd, key_);
  if (!demands_proof) co_return demands_proof.status();
  AcceptorHandshake handshake({.key = &key_, .demands_proof = *demands_proof, .purpose = "store"});
  const auto answer = handshake.answer(hello);
  if (!answer) co_return answer.status();
  const auto answered = co_await io.write_all(answer->bytes);
  if (!answer->verdict) co_return why_refused(fd, key_, answer->verdict);
  if (!answered.ok()) co_return cut_off(answered);
  Digest proof;
  const auto proved = co_await io.read_exactly(proof);
  if (!proved.ok() && handshake.agreement().proven && proved.code() == Code::connection_lost) {
    co_return Status(Code::unauthenticated,
                     "the client closed the connection after this store's proof: its key differs");
  }
  if (!proved.ok()) co_return cut_off(proved);
  co_return handshake.check(proof);
}

asio::awaitable<Status> Server::serve_one(std::shared_ptr<StoreConnection> session) {
  auto& io = session->io;
  const auto begun = co_await io.readable();  // idle time has no limit
  if (!begun.ok()) co_return begun;

  session->limit(bounds_.message);
  std::array<std::byte, store_protocol::header_bytes> header;
  const auto headed = co_await io.read_exactly(header);
  if (!headed.ok()) co_return cut_off(headed);
  const auto length = store_protocol::parse_length(header);
  if (!length) co_return length.status();
  Bytes body(*length);
  const auto whole = co_await io.read_exactly(body);
  if (!whole.ok()) co_return cut_off(whole);
  session->unlimited();

  const auto request = store_protocol::parse_request(body);
  if (!request) co_return request.status();
  const auto reply = co_await answer(*request);
  session->limit(bounds_.message);
  const auto replied = co_await io.write_all(reply);
  session->unlimited();
  co_return cut_off(replied);
}

// `request` views bytes of the calling coroutine, which waits until this one has ended.
asio::awaitable<Bytes> Server::answer(store_protocol::StoreRequest request) {
  using store_protocol::Op;
  const auto failed = [](const Status& status) {
    return encode(store_protocol::StoreReply{.code = status.code(), .value = view_of(status.what())});
  };
  if (request.op == Op::set) {
    const auto status = table_.set(request.key, request.value);
    co_return status ? encode(store_protocol::StoreReply{}) : failed(status);
  }
  if (request.op == Op::add) {
    const auto sum = table_.add(request.key, request.amount);
    co_return sum ? encode(store_protocol::StoreReply{.sum = *sum}) : failed(sum.status());
  }
  if (request.op == Op::erase) {
    table_.erase(request.key);
    co_return encode(store_protocol::StoreReply{});
  }
  const auto* value = table_.find(request.key);
  if (value == nullptr && request.milliseconds > 0) {
    asio::steady_timer timer(*io_, std::min(milliseconds(request.milliseconds), longest_wait));
    const Table::Waiter waiter(table_, std::string(request.key), timer);
    co_await timer.async_wait(awaiting);
    value = table_.find(request.key);
  }
  if (value == nullptr) co_return failed(Status(Code::deadline_exceeded, "not set"));
  co_return encode(store_protocol::StoreReply{.value = *value});
}

}  // namespace

Result<std::unique_ptr<TcpStoreServer>> TcpStoreServer::listen(const std::string& host, std::uint16_t port,
                                                               std::string key, TcpStoreBounds bounds,
                                                               std::string_view tls) {
  auto loaded = Key::load(key);
  if (!loaded) return loaded.status();
  auto with = Tls::make(tls, *loaded);
  if (!with) return with.status();
  if (loaded->empty() && !is_loopback(host)) {
    return Status(Code::unauthenticated,
                  formatted("a store on {} could be reached from other hosts, and there is no cluster key. {}. For one "
                            "host alone, use 127.0.0.1",
                            join_host_port(host, port), how_to_set_a_key()));
  }
  const auto addresses = resolve_host(host);
  if (addresses.empty()) return Status(Code::invalid_argument, formatted("the host \"{}\" has no address", host));
  auto listener = listen_tcp(addresses.front(), {port, port});
  if (!listener) {
    return Status(listener.status().code(), formatted("the store cannot listen: {}", listener.status().what()));
  }
  auto server = std::make_unique<Server>(std::move(*loaded), std::move(*with), bounds);
  if (auto status = server->start(std::move(*listener)); !status) return status;
  return std::unique_ptr<TcpStoreServer>(std::move(server));
}

}  // namespace tensorferry
