// The client of the built-in store: blocking calls, one request at a time on each connection. A thread takes an idle
// connection or opens one, so that a waiting get() delays no other call. Up to two idle connections stay open.

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "agent/handshake/auth.h"
#include "agent/rendezvous/store_protocol.h"
#include "agent/rendezvous/tcp_store.h"
#include "agent/transport/address.h"
#include "agent/transport/blocking_io.h"
#include "agent/transport/socket_port.h"
#include "agent/transport/tcp_liveness.h"
#include "agent/transport/tls_port.h"
#include "base/long_wait.h"
#include "base/per_process.h"
#include "base/text.h"

namespace tensorferry {

namespace {

using std::chrono::milliseconds;
using store_protocol::Op;

constexpr std::size_t most_idle = 2;
constexpr milliseconds operation_limit{30000};  // a server that takes longer for one operation has ended or hangs
constexpr milliseconds silence_limit{8000};     // of the server's kernel: then a firewall has forgotten the connection
constexpr milliseconds wait_at_server{10000};   // a longer get() asks again, and so notices that the server has ended

class Client final : public Store {
 public:
  Client(std::string host, std::uint16_t port, Key key, std::shared_ptr<Tls> tls, Clock clock)
      : host_(std::move(host)), port_(port), key_(std::move(key)), tls_(std::move(tls)), clock_(std::move(clock)) {}

  /// Opens the first connection; retries until `timeout`.
  Status open(milliseconds timeout);

  Status set(std::string_view key, ByteView value) override {
    return exchange({.op = Op::set, .key = key, .value = value}, deadline_after(operation_limit, clock_)).status();
  }
  Result<Bytes> get(std::string_view key, milliseconds timeout) override;
  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override {
    const auto answer =
        exchange({.op = Op::add, .key = key, .amount = amount}, deadline_after(operation_limit, clock_));
    if (!answer) return answer.status();
    return answer->sum;
  }
  Status erase(std::string_view key) override {
    return exchange({.op = Op::erase, .key = key}, deadline_after(operation_limit, clock_)).status();
  }
  [[nodiscard]] bool loopback() const override { return loopback_; }

 private:
  struct StoreReply {
    Bytes value;
    std::int64_t sum = 0;
  };
  Result<StoreReply> exchange(const store_protocol::StoreRequest& request, Deadline deadline);
  Result<StoreReply> exchange_on(StreamPort& port, ByteView request, Deadline deadline) const;
  struct Connection {
    std::unique_ptr<StreamPort> port;
    bool loopback = false;
  };
  Result<Connection> connect(Deadline deadline) const;
  Result<FileDescriptor> connect_to(const std::string& address, Deadline deadline) const;
  Result<std::unique_ptr<StreamPort>> secured(FileDescriptor socket, Deadline deadline) const;
  std::unique_ptr<StreamPort> take_idle();
  void give_back(std::unique_ptr<StreamPort> port);

  [[nodiscard]] Status named(const Status& status) const {
    const auto address = join_host_port(host_, port_);
    if (status.code() == Code::connection_lost) return rendezvous_gone(address, status.what());
    return {status.code(), formatted("store at {}: {}", address, status.what())};
  }

  const std::string host_;
  const std::uint16_t port_;
  const Key key_;
  const std::shared_ptr<Tls> tls_;  // null: none
  const Clock clock_;
  bool loopback_ = false;  // written by open() alone

  struct Idle {
    std::mutex mutex;
    std::vector<std::unique_ptr<StreamPort>> ports;
  };
  PerProcess<Idle> idle_;  // a forked child must not speak on its parent's connections
};

Status Client::open(milliseconds timeout) {
  const auto deadline = deadline_after(timeout, clock_);
  LongWait long_wait(clock_);
  for (milliseconds pause(10);; pause = std::min(pause * 2, milliseconds(500))) {
    auto connection = connect(deadline);
    if (connection) {
      loopback_ = connection->loopback;
      give_back(std::move(connection->port));
      return {};
    }
    const auto code = connection.status().code();
    const bool hopeless = code == Code::unauthenticated || code == Code::protocol_error;
    if (hopeless) return named(connection.status());
    long_wait.tell([&] {
      return formatted("waits for the process that serves the store at {} ({})", join_host_port(host_, port_),
                       connection.status().what());
    });
    if (clock_.now() + pause >= deadline) {
      return {Code::deadline_exceeded,
              formatted("no store at {} within {} s ({}): is the process that serves it running, and are its "
                        "address and port (MASTER_ADDR, MASTER_PORT) right?{}",
                        join_host_port(host_, port_), fixed(static_cast<double>(timeout.count()) / 1000, 1),
                        connection.status().what(), is_loopback(host_) ? only_this_host : "")};
    }
    clock_.sleep_for(pause);
  }
}

Result<Bytes> Client::get(std::string_view key, milliseconds timeout) {
  const auto until = deadline_after(timeout, clock_);
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(until - clock_.now());
    const auto wait = std::clamp(left, milliseconds(0), wait_at_server);
    auto answer = exchange({.op = Op::get, .key = key, .milliseconds = static_cast<std::uint32_t>(wait.count())},
                           deadline_after(wait + operation_limit, clock_));
    if (answer) return std::move(answer->value);
    const bool not_set = answer.status().code() == Code::not_found;  // exchange() says so: see there
    if (!not_set) return answer.status();
    if (clock_.now() >= until) {
      return named({Code::deadline_exceeded, formatted("key \"{}\" was not set within {} ms", key, timeout.count())});
    }
  }
}

Result<Client::StoreReply> Client::exchange(const store_protocol::StoreRequest& request, Deadline deadline) {
  const auto bytes = encode(request);
  if (!bytes) return bytes.status();
  for (bool again = false;; again = true) {
    auto port = again ? nullptr : take_idle();  // what ended one idle connection may have ended all
    if (!port) {
      auto fresh = connect(deadline);
      if (!fresh && fresh.status().code() == Code::deadline_exceeded) {
        return named({Code::connection_lost, "it does not answer"});
      }
      if (!fresh) return named(fresh.status());
      port = std::move(fresh->port);
    }
    auto answer = exchange_on(*port, *bytes, deadline);
    const auto code = answer.status().code();
    const bool in_step = answer.ok() || code == Code::not_found || code == Code::resource_exhausted;
    if (in_step) give_back(std::move(port));
    if (code == Code::deadline_exceeded) {
      return named({Code::connection_lost, "it does not answer"});
    }
    if (code != Code::connection_lost) return answer.ok() ? std::move(answer) : named(answer.status());
    if (request.op == Op::add && request.amount != 0) {
      return named({code, formatted("{}: the amount may or may not have been added", answer.status().what())});
    }
    if (again) return named(answer.status());
  }
}

// Sends one request and reads its reply. DeadlineExceeded: the network or the server was too slow. The server's own
// DeadlineExceeded ("not set in that time") becomes NotFound; the connection can then carry the next request.
Result<Client::StoreReply> Client::exchange_on(StreamPort& port, ByteView request, Deadline deadline) const {
  if (auto status = write_all(port, request, deadline, clock_); !status) return status;
  std::array<std::byte, store_protocol::header_bytes> header;
  if (auto status = read_exactly(port, header, deadline, clock_); !status) return status;
  const auto length = store_protocol::parse_length(header);
  if (!length) return length.status();
  Bytes body(*length);
  if (auto status = read_exactly(port, body, deadline, clock_); !status) return status;
  const auto reply = store_protocol::parse_reply(body);
  if (!reply) return reply.status();
  if (reply->code != Code::ok) {
    const auto code = reply->code == Code::deadline_exceeded ? Code::not_found : reply->code;
    return Status(code, std::string(text_of(reply->value)));
  }
  return StoreReply{.value = Bytes(reply->value.begin(), reply->value.end()), .sum = reply->sum};
}

Result<Client::Connection> Client::connect(Deadline deadline) const {
  const auto addresses = resolve_host(host_);
  Status failure(Code::connection_lost, formatted("the host \"{}\" has no address", host_));
  for (const auto& address : addresses) {
    auto socket = connect_to(address, deadline);
    if (!socket) {
      failure = socket.status();
      continue;
    }
    auto port = secured(std::move(*socket), deadline);
    if (!port) return port.status();
    const bool local = is_loopback(address);
    Terms terms{.key = &key_, .demands_proof = !key_.empty() || !local, .purpose = "store"};
    const auto greeted = handshake_as_dialler(**port, tls_ != nullptr, std::move(terms), deadline, clock_);
    if (!greeted) return greeted.status();
    return Connection{std::move(*port), local};
  }
  return failure;
}

/// Returns a port over the socket: with TLS, whose handshake is done, if this client uses TLS.
Result<std::unique_ptr<StreamPort>> Client::secured(FileDescriptor socket, Deadline deadline) const {
  std::unique_ptr<StreamPort> plain = std::make_unique<SocketPort>(std::move(socket), false);
  if (!tls_) return plain;
  auto tls = TlsPort::make(tls_, Side::dialler, std::move(plain));
  if (!tls) return tls.status();
  if (auto status = secure(**tls, deadline, clock_); !status) return status;
  return std::unique_ptr<StreamPort>(std::move(*tls));
}

Result<FileDescriptor> Client::connect_to(const std::string& address, Deadline deadline) const {
  if (key_.empty() && !is_loopback(address)) {
    return Status(Code::unauthenticated, formatted("it is on another host or can be reached from others, and there is "
                                                   "no cluster key. {}. For one host alone, use 127.0.0.1",
                                                   how_to_set_a_key()));
  }
  auto socket = connect_tcp(address, port_, deadline, clock_);
  if (socket.ok()) bound_silence(socket->get(), silence_limit);
  return socket;
}

std::unique_ptr<StreamPort> Client::take_idle() {
  auto& [mutex, ports] = idle_.get();
  const std::lock_guard lock(mutex);
  while (!ports.empty()) {
    auto port = std::move(ports.back());
    ports.pop_back();
    if (!spoiled(port->descriptor())) return port;
  }
  return nullptr;
}

void Client::give_back(std::unique_ptr<StreamPort> port) {
  auto& [mutex, ports] = idle_.get();
  const std::lock_guard lock(mutex);
  if (ports.size() < most_idle) ports.push_back(std::move(port));
}

}  // namespace

Result<std::shared_ptr<Store>> connect_tcp_store(const std::string& host, std::uint16_t port, std::string key,
                                                 milliseconds timeout, Clock clock, std::string_view tls) {
  auto loaded = Key::load(key);
  if (!loaded) return loaded.status();
  auto with = Tls::make(tls, *loaded);
  if (!with) return with.status();
  auto client = std::make_shared<Client>(host, port, std::move(*loaded), std::move(*with), std::move(clock));
  if (auto status = client->open(timeout); !status) return status;
  return std::shared_ptr<Store>(std::move(client));
}

}  // namespace tensorferry
