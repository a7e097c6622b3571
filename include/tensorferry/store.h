/// Where agents find one another, when neither a Python process nor torchrun serves them a store.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace tensorferry {

class Store;

/// A store inside this process, for agents of this process.
std::shared_ptr<Store> local_store();

/// Serves a store to the agents of a job until destroyed.
class StoreServer {
 public:
  /// `host`: the address to listen on. `port` 0: any free one. `key` "": TENSORFERRY_KEY_FILE or TENSORFERRY_KEY; where
  /// there is none loopback addresses alone. Throws Unauthenticated, InvalidArgument, ResourceExhausted.
  explicit StoreServer(const std::string& host = "127.0.0.1", std::uint16_t port = 0, const std::string& key = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  [[nodiscard]] std::uint16_t port() const;

 private:
  class Server;
  std::unique_ptr<Server> server_;
};

/// A client of a StoreServer, of this language or Python's. Goes on trying for `timeout`: the server may start later.
std::shared_ptr<Store> connect_store(const std::string& host, std::uint16_t port, const std::string& key = {},
                                     std::chrono::milliseconds timeout = std::chrono::seconds(60));

}  // namespace tensorferry
