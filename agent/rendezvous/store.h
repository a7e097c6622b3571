/// Where agents find one another: a small key-value store that every agent of a job can reach. c10d stores are adapted
/// in rpc/ (StoreAdapter); the built-in one is tcp_store.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "channels/bytes.h"
#include "channels/status.h"

namespace tensorferry {

/// Thread-safe; calls block. Values are small (a few KB).
class Store {
 public:
  virtual ~Store() = default;
  virtual Status set(std::string_view key, ByteView value) = 0;
  /// Waits up to `timeout` for the key to be set: DeadlineExceeded where it is not; 0 asks without waiting.
  virtual Result<Bytes> get(std::string_view key, std::chrono::milliseconds timeout) = 0;
  /// Adds to an integer (0 where there was none) and returns the sum; the key is not one of set()'s.
  virtual Result<std::int64_t> add(std::string_view key, std::int64_t amount) = 0;
  /// Whether only processes of this host can reach it: a cluster key made up at rendezvous is then secret enough.
  [[nodiscard]] virtual bool loopback() const = 0;
};

}  // namespace tensorferry
