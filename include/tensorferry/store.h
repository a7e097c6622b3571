/// The built-in key-value store where agents meet, for jobs in which neither a Python process nor torchrun serves one.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace tensorferry {

/// A key-value store, or a client of one: see AgentOptions::store.
class Store;

/// Makes a store in this process, for agents of this process. Thread-safe.
std::shared_ptr<Store> local_store();

/// Serves a store to the agents of a job over TCP, until it is destroyed.
class StoreServer {
 public:
  /// Listens on the address `host` and on `port` (0: any free one), and asks every client for `key`.
  ///
  /// `key` "": TENSORFERRY_KEY_FILE or TENSORFERRY_KEY. Without any key, the server listens on loopback addresses only
  /// and admits processes of this user only. Throws:
  ///
  /// - Unauthenticated: there is no key, and `host` is not a loopback address.
  /// - InvalidArgument, ResourceExhausted: `host` is no address of this machine, or the port is taken.
  ///
  /// `tls`: as AgentOptions::tls, which throws the same errors; the clients need the same form.
  explicit StoreServer(const std::string& host = "127.0.0.1", std::uint16_t port = 0, const std::string& key = {},
                       const std::string& tls = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  /// Returns the port that the server listens on.
  [[nodiscard]] std::uint16_t port() const;

 private:
  class Server;
  std::unique_ptr<Server> server_;
};

/// Connects to a StoreServer of either language. Retries for `timeout`, because the server may start later. Throws
/// Unauthenticated (the key is missing or wrong), ProtocolError (the server is no store), or DeadlineExceeded (no
/// server answered within `timeout`). `tls`: as the server's.
std::shared_ptr<Store> connect_store(const std::string& host, std::uint16_t port, const std::string& key = {},
                                     std::chrono::milliseconds timeout = std::chrono::seconds(60),
                                     const std::string& tls = {});

}  // namespace tensorferry
