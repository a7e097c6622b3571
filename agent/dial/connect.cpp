// How an agent reaches another one; dial.cpp decides when it tries.
#include "agent/dial/connect.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <cerrno>
#include <cstring>
#include <future>
#include <list>
#include <utility>

#include "agent/handshake/auth.h"
#include "agent/handshake/handshake_io.h"
#include "agent/transport/address.h"
#include "agent/transport/network.h"
#include "agent/transport/socket_port.h"
#include "base/text.h"

namespace tensorferry {
namespace {

namespace asio = boost::asio;

Terms terms_of(const Engine& engine, bool demands_proof) {
  Terms terms;
  terms.key = &engine.identity.key;
  terms.demands_proof = demands_proof;
  terms.purpose = "link";
  terms.version_min = wire::version_min;
  terms.version_max = wire::version_max;
  return terms;
}

Result<std::unique_ptr<StreamPort>> start_connect(const Engine& engine, const std::string& address) {
  if (const auto& network = engine.options.surroundings.network) return network->start_connect(address);
  const auto where = split_host_port(address);
  if (!where) return where.status();
  auto socket = start_connect_tcp(where->host, where->port);
  if (!socket) return socket.status();
  return std::unique_ptr<StreamPort>(std::make_unique<SocketPort>(std::move(*socket), false));
}

/// Connects to the addresses of one agent side by side: to the first one at once, and to each further one when all
/// before it have failed, or have not answered for a moment. So an address that drops packets costs little time.
class TcpRace {
 public:
  struct Winner {
    std::string address;
    std::unique_ptr<StreamPort> port;
  };

  TcpRace(Engine& engine, const std::vector<std::string>& addresses, Clock::time_point deadline)
      : engine_(engine),
        addresses_(addresses),
        deadline_(deadline),
        wake_(std::make_shared<Timer>(engine.reactor->context(), engine.clock)) {}

  /// Waits for the next connection that is made. Nullopt: all other addresses have failed, or the deadline has passed.
  asio::awaitable<std::optional<Winner>> next() {
    while (!open_.empty() || begun_ < addresses_.size()) {
      const auto now = engine_.clock.now();
      if (begun_ < addresses_.size() && (open_.empty() || now >= next_begin_)) {
        begin(addresses_[begun_++]);
        next_begin_ = now + alone_for;
      } else if (auto winner = take_ready()) {
        co_return winner;
      } else if (!open_.empty() && now >= deadline_) {
        for (const auto& each : open_) note(each->address, "no answer");
        silent_ = true;
        open_.clear();
        begun_ = addresses_.size();
      } else if (!open_.empty()) {
        co_await wake_->wait_until(begun_ < addresses_.size() ? std::min(next_begin_, deadline_) : deadline_);
      }
    }
    co_return std::nullopt;
  }
  /// Returns what happened at the addresses so far; "": nothing went wrong.
  [[nodiscard]] const std::string& failures() const { return failures_; }
  /// Returns whether an address did not answer, so that another attempt may succeed.
  [[nodiscard]] bool silent() const { return silent_; }
  /// Returns whether the host of an address has said that no process listens there.
  [[nodiscard]] bool refused() const { return refused_; }
  void note(const std::string& address, std::string_view what) {
    if (!failures_.empty()) failures_ += "; ";
    failures_ += address + ": " + std::string(what);
  }

 private:
  static constexpr Milliseconds alone_for{300};

  /// A connection that is being made.
  struct Attempt {
    Attempt(asio::io_context& context, std::string to, std::unique_ptr<StreamPort> by)
        : address(std::move(to)), port(std::move(by)), descriptor(context, port->descriptor()) {}
    ~Attempt() { (void)descriptor.release(); }
    Attempt(const Attempt&) = delete;
    Attempt& operator=(const Attempt&) = delete;

    std::string address;
    std::unique_ptr<StreamPort> port;
    asio::posix::stream_descriptor descriptor;  // the port's, which closes it
    bool ready = false;                         // it has been made, or has failed
  };

  void begin(const std::string& address) {
    auto port = start_connect(engine_, address);
    if (!port) {
      // The kernel knows no route at the moment, or has no socket left.
      silent_ = silent_ || port.status().code() != Code::invalid_argument;
      return note(address, port.status().what());
    }
    const auto attempt = std::make_shared<Attempt>(engine_.reactor->context(), address, std::move(*port));
    open_.push_back(attempt);
    attempt->descriptor.async_wait(
        asio::posix::stream_descriptor::wait_write,
        [weak = std::weak_ptr(attempt), wake = wake_](const boost::system::error_code& cancelled) {
          const auto made = weak.lock();
          if (cancelled || !made) return;
          made->ready = true;
          wake->cancel();
        });
  }

  /// Takes out the latest connection that has been made; notes those that have failed.
  std::optional<Winner> take_ready() {
    for (std::size_t i = open_.size(); i-- > 0;) {
      if (!open_[i]->ready) continue;
      const auto made = open_[i];
      open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
      (void)made->descriptor.release();
      const int error = made->port->connect_error();
      if (error == 0) return Winner{made->address, std::move(made->port)};
      (error == ECONNREFUSED ? refused_ : silent_) = true;
      note(made->address, std::strerror(error));
    }
    return std::nullopt;
  }

  Engine& engine_;
  const std::vector<std::string>& addresses_;
  const Clock::time_point deadline_;
  const std::shared_ptr<Timer> wake_;
  std::size_t begun_ = 0;
  Clock::time_point next_begin_;
  std::vector<std::shared_ptr<Attempt>> open_;  // in the order of the addresses
  std::string failures_;
  bool silent_ = false, refused_ = false;
};

asio::awaitable<Result<wire::Hello>> read_hello(HandshakeIo& io) {
  Bytes head(wire::Header::size);
  if (auto status = co_await io.read_exactly(head); !status) co_return status;
  const auto header = wire::Header::decode(head);
  if (!header) co_return header.status();
  if (header->kind != wire::Kind::hello) co_return Status(Code::protocol_error, "the first frame is not a hello");
  Bytes body(header->length);
  if (auto status = co_await io.read_exactly(body); !status) co_return status;
  co_return wire::Hello::decode(body);
}

/// The dialling side of the handshake. If neither side demands a proof, the acceptor must be this user's.
asio::awaitable<Status> shake_hands(Engine& engine, HandshakeIo& io) {
  const auto during = [](const Status& status) {
    return Status(status.code(), formatted("the handshake with a peer failed: {}", status.what()));
  };
  const int fd = io.port().descriptor();
  const bool tls_here = engine.identity.tls && !io.port().local();
  DiallerHandshake handshake(terms_of(engine, dialler_demands_proof(fd, engine.identity.key)));
  std::array<std::byte, DiallerHandshake::answer_bytes> answer{};
  if (auto status = co_await io.write_all(handshake.hello()); !status) co_return during(status);
  if (auto status = co_await io.read_exactly(answer); !status)
    co_return !tls_here && is_tls(answer) ? only_peer_uses_tls() : during(status);
  const auto mine = handshake.answer(answer);
  if (!mine) co_return mine.status();
  if (!handshake.agreement().proven) {
    if (auto status = check_same_user(fd); !status) co_return status;
  }
  if (auto status = co_await io.write_all(*mine); !status) co_return during(status);
  co_return Status();
}

/// Completes the handshake on a new connection and reads the peer's hello. ResourceExhausted: refused for now.
asio::awaitable<Result<Connected>> run_handshake(Engine& engine, std::unique_ptr<StreamPort> port,
                                                 Clock::time_point deadline) {
  TlsPort* tls = nullptr;
  if (engine.identity.tls && !port->local()) {
    auto secured = TlsPort::make(engine.identity.tls, Side::dialler, std::move(port));
    if (!secured) co_return secured.status();
    tls = secured->get();
    port = std::move(*secured);
  }
  HandshakeIo io(engine.reactor->context(), engine.clock, std::move(port));
  io.set_deadline(deadline);
  if (tls != nullptr) {
    if (const auto status = co_await io.secure(*tls); !status.ok()) co_return refused_for_now(status);
  }
  if (const auto status = co_await shake_hands(engine, io); !status.ok()) co_return refused_for_now(status);
  auto hello = co_await read_hello(io);
  if (!hello) co_return refused_for_now(hello.status());
  co_return Connected{io.take_port(), std::move(*hello), true};
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

asio::awaitable<DialResult> reach_by_unix_socket(Engine& engine, const Record& record, FileDescriptor socket,
                                                 Clock::time_point deadline) {
  std::unique_ptr<StreamPort> port = std::make_unique<SocketPort>(std::move(socket), true);
  auto connected = co_await run_handshake(engine, std::move(port), deadline);
  if (connected) {
    if (auto why = check_answer(record, connected->hello); !why.ok()) connected = std::move(why);
  }
  const bool may_answer = connected.status().code() == Code::resource_exhausted;
  co_return DialResult{std::move(connected), may_answer};
}

/// Runs `work` on the reactor and waits for its result; `otherwise` if the agent leaves meanwhile, or has no thread.
template <class Value>
Value await_on_reactor(Engine& engine, asio::awaitable<Value> work, Value otherwise) {
  if (!engine.options.surroundings.threads) return otherwise;
  auto promise = std::make_shared<std::promise<Value>>();
  auto result = promise->get_future();
  const bool taken =
      engine.reactor->post([&reactor = *engine.reactor, held = std::move(work), answer = std::move(promise)]() mutable {
        asio::co_spawn(reactor.context(), std::move(held), [answer](const std::exception_ptr& failure, Value value) {
          if (!failure) answer->set_value(std::move(value));
        });
      });
  if (!taken) return otherwise;
  try {
    return result.get();
  } catch (const std::future_error&) {  // it was dropped
    return otherwise;
  }
}

}  // namespace

Status refused_for_now(const Status& status) {
  const bool cut = status.code() == Code::connection_lost || status.code() == Code::deadline_exceeded;
  return cut ? Status(Code::resource_exhausted, std::string(status.what())) : status;
}

asio::awaitable<Result<std::uint64_t>> read_go(HandshakeIo& io) {
  Bytes head(wire::Header::size);
  if (auto status = co_await io.read_exactly(head); !status) co_return status;
  const auto header = wire::Header::decode(head);
  if (!header) co_return header.status();
  if (header->kind != wire::Kind::go || header->length != 0 || header->trailing != 0 || header->connection == 0)
    co_return Status(Code::protocol_error, "a connection's first frame after the hellos is not `go`");
  co_return header->connection;
}

asio::awaitable<DialResult> reach(std::shared_ptr<Engine> engine, Record record, Clock::time_point deadline) {
  Status why(Code::connection_lost, "it has no address that this agent can use");
  bool may_answer = false;
  const bool may_unix = engine->options.unix_sockets && may_share_unix(engine->identity.record, record);
  if (may_unix) {
    auto socket = connect_unix(record.unix_address);
    if (socket) {
      auto reached = co_await reach_by_unix_socket(*engine, record, std::move(*socket), deadline);
      co_return reached;
    }
    why = socket.status();
    may_answer = why.code() == Code::resource_exhausted;  // many agents dial it at once
  }
  const auto unix_failure = why;
  TcpRace race(*engine, record.tcp_addresses, deadline);
  auto code = Code::connection_lost;
  for (;;) {
    auto winner = co_await race.next();
    if (!winner) break;
    auto connected = co_await run_handshake(*engine, std::move(winner->port), deadline);
    auto answer = connected ? check_answer(record, connected->hello) : connected.status();
    if (answer.ok()) co_return DialResult{std::move(connected), may_answer};
    // A living agent would have answered at its unix address: another process has the port of an agent that has ended.
    if (may_unix && answer.code() == Code::unauthenticated)
      answer = {Code::connection_lost, formatted("{}, but another process answers at {}: {}", unix_failure.what(),
                                                 winner->address, answer.what())};
    may_answer = may_answer || answer.code() == Code::resource_exhausted;
    if (answer.code() != Code::resource_exhausted) code = answer.code();
    race.note(winner->address, answer.what());
  }
  may_answer = may_answer || race.silent();
  co_return DialResult{race.failures().empty() ? why : Status(code, race.failures()), may_answer};
}

asio::awaitable<bool> finds_no_listener(std::shared_ptr<Engine> engine, Record record) {
  if (!in_this_network(*engine, record) || record.tcp_addresses.empty()) co_return false;
  for (const auto& address : record.tcp_addresses) {
    const std::vector<std::string> one{address};
    TcpRace race(*engine, one, engine->clock.now() + std::chrono::seconds(1));
    (void)co_await race.next();
    if (!race.refused()) co_return false;
  }
  co_return true;
}

bool agent_answers(Engine& engine, const Record& record) {
  const auto work = [](std::shared_ptr<Engine> by, Record of) -> asio::awaitable<bool> {
    const auto until = by->clock.now() + std::chrono::seconds(2);
    const auto reached = co_await reach(by, std::move(of), until);
    co_return reached.connected.ok();
  };
  return await_on_reactor(engine, work(engine.shared_from_this(), record), false);
}

bool has_ended(Engine& engine, const Record& record, bool earlier) {
  if (record.incarnation == engine.identity.self.incarnation) return false;
  if (!earlier && !in_this_network(engine, record)) return false;
  const auto work = [](std::shared_ptr<Engine> by, Record of) -> asio::awaitable<bool> {
    const auto until = by->clock.now() + std::chrono::seconds(2);
    const auto reached = co_await reach(by, std::move(of), until);
    co_return reached.connected.status().code() == Code::connection_lost && !reached.may_answer;
  };
  return await_on_reactor(engine, work(engine.shared_from_this(), record), false);
}

bool listener_is_gone(Engine& engine, const Record& record) {
  return await_on_reactor(engine, finds_no_listener(engine.shared_from_this(), record), false);
}

}  // namespace tensorferry
