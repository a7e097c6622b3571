/// The interface of the rendezvous: a small key-value store that every agent of a job can reach. Its implementations
/// are tcp_store.h (built in), memory_store.h, torch_store.h, and in rpc/ an adapter of c10d stores (StoreAdapter).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/status.h"

namespace tensorferry {

/// Thread-safe. Calls block. Values are small (a few KB).
class Store {
 public:
  virtual ~Store() = default;
  /// Sets the key to `value`; replaces an earlier value.
  virtual Status set(std::string_view key, ByteView value) = 0;
  /// Returns the key's value; waits up to `timeout` for the key to be set. 0 asks without waiting. DeadlineExceeded: it
  /// was not set.
  virtual Result<Bytes> get(std::string_view key, std::chrono::milliseconds timeout) = 0;
  /// Adds to an integer, which begins at 0, and returns the sum. A key belongs either to add() or to set() and get().
  virtual Result<std::int64_t> add(std::string_view key, std::int64_t amount) = 0;
  /// Returns whether only processes of this host can reach the store: if so, it may hold a generated cluster key.
  [[nodiscard]] virtual bool loopback() const = 0;
};

}  // namespace tensorferry
