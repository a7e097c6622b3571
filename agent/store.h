/// The interface of the rendezvous: a small key-value store that every agent of a job can reach. Its implementations
/// are tcp_store.h (built in), memory_store.h, torch_store.h, and in rpc/ an adapter of c10d stores (StoreAdapter).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/status.h"
#include "base/text.h"

namespace tensorferry {

/// Thread-safe. Calls block. Values are small (a few KB).
///
/// A store in another process fails with rendezvous_gone() once that process has ended or no longer answers.
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
  /// Deletes the key, whether it has a value or an integer, which then begins at 0 again. Ok if there is no such key. A
  /// store that cannot delete keeps the key and returns Ok, so this serves to save memory alone.
  virtual Status erase(std::string_view key) {
    static_cast<void>(key);
    return {};
  }
  /// Returns whether the agents that meet here are all on this host: the store is in this process, in a file of this
  /// host, or at a loopback address. If so, they need no cluster key. The store holds no secret.
  [[nodiscard]] virtual bool loopback() const = 0;
};

/// Returns the error of a store whose server at `address` (host:port) has ended or does not answer: ConnectionLost.
inline Status rendezvous_gone(std::string_view address, std::string_view why) {
  return {Code::connection_lost, formatted("the rendezvous host at {} is gone ({})", address, why)};
}

/// Ends the error of a client that finds no server at a loopback address.
inline constexpr std::string_view only_this_host =
    " The address is a loopback one: processes of other hosts cannot meet there";

}  // namespace tensorferry
