/// A client of torch's TCPStore, for processes without torch that join a job of Python processes. It speaks the
/// protocol of c10d::TCPStore from torch 2.3 on. The server runs in a Python process (rank 0, or torchrun).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "agent/store.h"
#include "base/clock.h"

namespace tensorferry {

struct TorchStoreOptions {
  bool counts_as_worker = false;              // add this process to the workers that the server waits for
  std::chrono::milliseconds timeout{300000};  // to connect; the server may start later
  Clock clock{};
};

/// Connects to a TCPStore; retries until `options.timeout`, then fails with DeadlineExceeded. The store has one
/// connection, on which calls take turns. A broken connection is opened again; set(), erase() and the check within
/// get() are repeated once, add() is not. Neither end of this protocol proves its identity: see docs/security.md.
Result<std::shared_ptr<Store>> connect_torch_store(const std::string& host, std::uint16_t port,
                                                   TorchStoreOptions options);

}  // namespace tensorferry
