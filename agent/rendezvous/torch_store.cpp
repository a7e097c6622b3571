// One connection, one request at a time. Numbers have this host's byte order (little-endian); lengths are u64. A
// request is u8 query, then: SET key value; GET key -> value; ADD key i64 -> i64; CHECK u64 count, keys -> u8 (0: all
// exist); DELETE key -> i64 number of keys deleted; VALIDATE u32 magic; PING u32 nonce -> the nonce. Every key has a
// '/' in front.

#include "agent/rendezvous/torch_store.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>

#include "agent/transport/address.h"
#include "agent/transport/blocking_io.h"
#include "base/long_wait.h"
#include "base/per_process.h"
#include "base/text.h"

namespace tensorferry {
namespace {

using std::chrono::milliseconds;

enum class Query : std::uint8_t { validate = 0, set = 1, get = 3, add = 4, check = 5, erase = 8, ping = 13 };

constexpr std::uint32_t magic = 0x3C85F7CE;
constexpr milliseconds operation_patience{30000};  // a server that takes longer for one operation has ended or hangs
constexpr milliseconds first_pause{1}, longest_pause{20};
constexpr std::uint64_t longest_value = 64 << 20;

class TorchStore final : public Store {
 public:
  TorchStore(std::string host, std::uint16_t port, TorchStoreOptions options)
      : host_(std::move(host)),
        port_(port),
        options_(std::move(options)),
        clock_(options_.clock),
        loopback_(is_loopback(host_)) {}

  /// Opens the first connection; retries until `options.timeout`.
  Status open();

  Status set(std::string_view key, ByteView value) override;
  Result<Bytes> get(std::string_view key, milliseconds timeout) override;
  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override;
  Status erase(std::string_view key) override;
  [[nodiscard]] bool loopback() const override { return loopback_; }

 private:
  /// Sends `request` and reads `answer`. If the connection breaks, reconnects and repeats the request once, unless
  /// `once`. The caller holds the mutex.
  Status exchange(ByteView request, std::span<std::byte> answer, bool once = false);
  Status exchange_once(ByteView request, std::span<std::byte> answer);
  Status connect(Deadline deadline);
  Result<std::int64_t> add_raw(std::string_view key, std::int64_t amount);
  void put_key(Writer& out, std::string_view key) const {
    out.put(std::uint64_t{1 + key.size()});
    out.raw(view_of("/"));
    out.raw(view_of(key));
  }
  [[nodiscard]] Status named(const Status& status) const {
    const auto address = join_host_port(host_, port_);
    if (status.code() == Code::connection_lost) return rendezvous_gone(address, status.what());
    return {status.code(), formatted("torch's store at {}: {}", address, status.what())};
  }
  /// Reports an error of a request: a server that takes too long has ended or hangs.
  [[nodiscard]] Status failed(const Status& status) const {
    if (status.code() != Code::deadline_exceeded) return named(status);
    return named({Code::connection_lost, "it does not answer"});
  }

  const std::string host_;
  const std::uint16_t port_;
  const TorchStoreOptions options_;
  const Clock clock_;
  const bool loopback_;

  struct Connection {
    std::mutex mutex;  // held during a request
    FileDescriptor socket;
  };
  [[nodiscard]] FileDescriptor& own_socket() { return connection_.get().socket; }
  PerProcess<Connection> connection_;  // a forked child must not speak on its parent's
};

Status TorchStore::open() {
  const auto deadline = deadline_after(options_.timeout, clock_);
  LongWait long_wait(clock_);
  Status status;
  {
    const std::lock_guard lock(connection_.get().mutex);
    for (milliseconds pause(10);; pause = std::min(pause * 2, milliseconds(500))) {
      status = connect(deadline);
      if (status.ok()) break;
      long_wait.tell([&] {
        return formatted("waits for the process of rank 0 or torchrun, which serves the rendezvous at {} ({})",
                         join_host_port(host_, port_), status.what());
      });
      if (clock_.now() + pause >= deadline) {
        return {Code::deadline_exceeded,
                formatted("no store at {} within {} s ({}): is the process of rank 0 running, and are the address "
                          "and port (MASTER_ADDR, MASTER_PORT) right?{}",
                          join_host_port(host_, port_), fixed(static_cast<double>(options_.timeout.count()) / 1000, 1),
                          status.what(), loopback_ ? only_this_host : "")};
      }
      clock_.sleep_for(pause);
    }
  }
  if (options_.counts_as_worker) return add_raw("init/", 1).status();
  return {};
}

Status TorchStore::connect(Deadline deadline) {
  Status failure(Code::connection_lost, formatted("the host \"{}\" has no address", host_));
  for (const auto& address : resolve_host(host_)) {
    auto socket = connect_tcp(address, port_, deadline, clock_);
    if (!socket) {
      failure = socket.status();
      continue;
    }
    Bytes hello;
    Writer out(hello);
    out.put(Query::validate);
    out.put(magic);
    out.put(Query::ping);
    const auto nonce = static_cast<std::uint32_t>(::getpid());
    out.put(nonce);
    std::array<std::byte, sizeof nonce> answer{};
    failure = write_all(socket->get(), hello, deadline, clock_);
    if (failure.ok()) failure = read_exactly(socket->get(), answer, deadline, clock_);
    if (failure.ok() && std::memcmp(answer.data(), &nonce, sizeof nonce) != 0) {
      failure = {Code::protocol_error, "the server there is not a store of torch"};
    }
    if (!failure.ok()) continue;
    own_socket() = *std::move(socket);
    return {};
  }
  return failure;
}

Status TorchStore::exchange(ByteView request, std::span<std::byte> answer, bool once) {
  const bool fresh = !own_socket() || spoiled(own_socket().get());
  if (fresh) {
    if (auto status = connect(deadline_after(operation_patience, clock_)); !status) return failed(status);
  }
  auto status = exchange_once(request, answer);
  if (status.ok()) return {};
  own_socket() = {};
  if (once || fresh || status.code() != Code::connection_lost) return failed(status);
  if (auto again = connect(deadline_after(operation_patience, clock_)); !again) return failed(again);
  status = exchange_once(request, answer);
  return status.ok() ? status : failed(status);
}

Status TorchStore::exchange_once(ByteView request, std::span<std::byte> answer) {
  const auto deadline = deadline_after(operation_patience, clock_);
  if (auto status = write_all(own_socket().get(), request, deadline, clock_); !status) return status;
  return answer.empty() ? Status() : read_exactly(own_socket().get(), answer, deadline, clock_);
}

Status TorchStore::set(std::string_view key, ByteView value) {
  Bytes request;
  Writer out(request);
  out.put(Query::set);
  put_key(out, key);
  out.put(std::uint64_t{value.size()});
  out.raw(value);
  // SET has no answer: the answer to a PING behind it shows that the server has done it.
  out.put(Query::ping);
  out.put(magic);
  std::array<std::byte, sizeof magic> pong{};
  const std::lock_guard lock(connection_.get().mutex);
  return exchange(request, pong);
}

Result<Bytes> TorchStore::get(std::string_view key, milliseconds timeout) {
  Bytes check, request;
  Writer asks(check), gets(request);
  asks.put(Query::check);
  asks.put(std::uint64_t{1});
  put_key(asks, key);
  gets.put(Query::get);
  put_key(gets, key);
  const auto until = deadline_after(timeout, clock_);
  for (auto pause = first_pause;; pause = std::min(2 * pause, longest_pause)) {
    {
      const std::lock_guard lock(connection_.get().mutex);
      std::array<std::byte, 1> missing{};
      if (auto status = exchange(check, missing); !status) return status;
      if (missing[0] == std::byte{0}) {
        std::uint64_t length = 0;
        if (auto status = exchange(request, std::as_writable_bytes(std::span(&length, 1)), true); !status)
          return status;
        if (length > longest_value) {
          own_socket() = {};
          return named({Code::protocol_error, formatted("a value of {} bytes", length)});
        }
        Bytes value(length);
        if (auto status = read_exactly(own_socket().get(), value, deadline_after(operation_patience, clock_), clock_);
            !status) {
          own_socket() = {};
          return failed(status);
        }
        return value;
      }
    }
    const auto left = until - clock_.now();
    if (left <= std::chrono::nanoseconds::zero()) {
      return named({Code::deadline_exceeded, formatted("\"{}\" was not set within {} ms", key, timeout.count())});
    }
    clock_.sleep_for(std::min<std::chrono::nanoseconds>(pause, left));
  }
}

Result<std::int64_t> TorchStore::add(std::string_view key, std::int64_t amount) {
  return add_raw("/" + std::string(key), amount);
}

Status TorchStore::erase(std::string_view key) {
  Bytes request;
  Writer out(request);
  out.put(Query::erase);
  put_key(out, key);
  std::int64_t erased = 0;
  const std::lock_guard lock(connection_.get().mutex);
  return exchange(request, std::as_writable_bytes(std::span(&erased, 1)));
}

Result<std::int64_t> TorchStore::add_raw(std::string_view key, std::int64_t amount) {
  Bytes request;
  Writer out(request);
  out.put(Query::add);
  out.put(std::uint64_t{key.size()});
  out.raw(view_of(key));
  out.put(amount);
  std::int64_t sum = 0;
  const std::lock_guard lock(connection_.get().mutex);
  auto status = exchange(request, std::as_writable_bytes(std::span(&sum, 1)), true);
  if (!status.ok()) return status;
  return sum;
}

}  // namespace

Result<std::shared_ptr<Store>> connect_torch_store(const std::string& host, std::uint16_t port,
                                                   TorchStoreOptions options) {
  auto store = std::make_shared<TorchStore>(host, port, std::move(options));
  if (auto status = store->open(); !status) return status;
  return std::shared_ptr<Store>(std::move(store));
}

}  // namespace tensorferry
