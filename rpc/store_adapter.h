/// Adapter that makes a c10d store a Store, so that agents meet in the store that torch's processes use.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "agent/store.h"

namespace tensorferry {

/// Wraps any c10d::Store.
///
/// Threads: the calling thread must not hold the GIL, because a store written in Python takes it.
///
/// Errors: get() returns DeadlineExceeded if the key was not set in time. An exception of a TCPStore's connection
/// becomes rendezvous_gone(), any other exception Internal; both with the first line of its text.
class StoreAdapter final : public Store {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store);

  Status set(std::string_view key, ByteView value) override;
  /// Polls for the key. c10d's wait() would block other calls of the store and log each time-out.
  Result<Bytes> get(std::string_view key, std::chrono::milliseconds timeout) override;
  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override;
  /// Ok also for a store that has no deleteKey().
  Status erase(std::string_view key) override;
  /// Returns true for a store in this process, in a file of a local file system, or at a loopback address.
  [[nodiscard]] bool loopback() const override { return loopback_; }

 private:
  /// Runs `operation` and turns an exception that it throws into a Status.
  template <class Operation>
  Status guarded(std::string_view what, std::string_view key, Operation operation) const;

  c10::intrusive_ptr<c10d::Store> store_;
  bool loopback_;
  std::string address_;  // of a TCPStore's server; "" for other stores
};

}  // namespace tensorferry
