/// A client of torch's TCPStore, for processes without torch that join a job of Python's: torch's own protocol, as
/// c10d::TCPStore speaks it from torch 2.3 on. The server is Python's (rank 0, or torchrun).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "agent/rendezvous/store.h"

namespace tensorferry {

struct TorchStoreOptions {
  bool counts_as_worker = false;              // the server waits for a number of workers, of whom this is one
  std::chrono::milliseconds timeout{300000};  // to connect: the server may start later
};

/// Errors as connect_tcp_store's. The store has no proof of who is at its other end: see docs/security.md.
Result<std::shared_ptr<Store>> connect_torch_store(const std::string& host, std::uint16_t port,
                                                   TorchStoreOptions options);

}  // namespace tensorferry
