/// The built-in rendezvous: a key-value store over TCP, where there is no c10d store (docs/protocol.md, "The built-in
/// store").
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "agent/rendezvous/store.h"

namespace tensorferry {

/// What a server holds at most: a client past one of them gets ResourceExhausted, a connection past its is closed.
struct TcpStoreBounds {
  std::size_t keys = std::size_t{1} << 18;
  std::size_t bytes = std::size_t{256} << 20;  // of keys and values together
  std::size_t connections = 16384;
  std::chrono::milliseconds handshake{5000};  // a client that has not proved itself by then, or stops in mid-request
};

/// Serves a store until destroyed; one of the job's processes holds it. Every client proves that it knows `key` before
/// anything else of it is parsed. `key` "": what TENSORFERRY_KEY_FILE or TENSORFERRY_KEY gives; where there is none,
/// loopback addresses alone, no proof asked, and processes of this user alone.
class TcpStoreServer {
 public:
  virtual ~TcpStoreServer() = default;
  [[nodiscard]] virtual std::uint16_t port() const = 0;
  /// `host`: the address to listen on. `port` 0: any. Unauthenticated: no key, and `host` is not loopback (the error
  /// has the lines to type); InvalidArgument, ResourceExhausted: no such address, port taken.
  static Result<std::unique_ptr<TcpStoreServer>> listen(const std::string& host, std::uint16_t port, std::string key,
                                                        TcpStoreBounds bounds = {});
};

/// A client of `host:port`; retries the connection up to `timeout` (the server may start later). `key` as in listen().
/// A connection that broke is opened again by the next call; one that finds nobody listening fails at once with
/// ConnectionLost. An add() whose answer was lost says so: it may have been applied.
Result<std::shared_ptr<Store>> connect_tcp_store(const std::string& host, std::uint16_t port, std::string key,
                                                 std::chrono::milliseconds timeout);

}  // namespace tensorferry
