/// The built-in rendezvous: a key-value store over TCP, for jobs without a c10d store (docs/protocol.md, "The built-in
/// store").
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "agent/store.h"
#include "base/clock.h"

namespace tensorferry {

/// Bounds on a server. A request beyond `keys` or `bytes` gets ResourceExhausted; a connection beyond `connections`
/// that have proved themselves is closed. Those that have not take places among the strangers
/// (agent/handshake/strangers.h).
struct TcpStoreBounds {
  std::size_t keys = std::size_t{1} << 18;
  std::size_t bytes = std::size_t{256} << 20;  // of keys and values together
  std::size_t connections = 16384;
  std::chrono::milliseconds message{5000};  // time limit on a request's bytes, and on a reply's
};

/// Serves a store on one thread of its own until destroyed. One process of the job holds it. Every client proves that
/// it knows the key before the server parses anything else of it.
///
/// If `key` is "", TENSORFERRY_KEY_FILE or TENSORFERRY_KEY gives the key. If there is no key, the server demands no
/// proof, listens on loopback addresses alone, and serves the processes of this user alone, whose user the kernel
/// tells.
///
/// In a forked child the destructor does nothing: the thread is the parent's.
class TcpStoreServer {
 public:
  virtual ~TcpStoreServer() = default;
  [[nodiscard]] virtual std::uint16_t port() const = 0;
  /// Listens on `host` and `port`; with port 0 the kernel picks one. Unauthenticated: there is no key and `host` is not
  /// loopback (the text has the lines to type); InvalidArgument: the host has no address, or not one of this machine;
  /// ResourceExhausted: the port is taken.
  /// `tls`: as RawAgentOptions::tls; the clients need the same form. InvalidArgument: see Tls::make.
  static Result<std::unique_ptr<TcpStoreServer>> listen(const std::string& host, std::uint16_t port, std::string key,
                                                        TcpStoreBounds bounds = {}, std::string_view tls = {});
};

/// Connects a client to `host:port`; retries for up to `timeout`, because the server may start later. `key` as in
/// listen(). Without a key, the server's process must be this user's; the client asks the kernel for each connection.
/// Errors: DeadlineExceeded, Unauthenticated, ProtocolError. `tls`: as in listen().
///
/// If a connection breaks, set(), get() and erase() open a new one and repeat the request once. add() fails with
/// ConnectionLost and says that the amount may or may not have been added. If the server has ended, calls fail at once
/// with ConnectionLost.
Result<std::shared_ptr<Store>> connect_tcp_store(const std::string& host, std::uint16_t port, std::string key,
                                                 std::chrono::milliseconds timeout, Clock clock = {},
                                                 std::string_view tls = {});

}  // namespace tensorferry
