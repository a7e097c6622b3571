/// A c10d store as the agent's: agents find one another wherever torch's processes do.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "agent/rendezvous/store.h"

namespace tensorferry {

/// Any c10d::Store. What the store throws becomes a Status: DeadlineExceeded where a key did not come, else Internal
/// with the store's own words. Calls must not hold the GIL (a store written in Python takes it).
class StoreAdapter final : public Store {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store);

  Status set(std::string_view key, ByteView value) override;
  /// Asks again and again instead of c10d's wait(), which keeps other calls of the store waiting and logs each
  /// time-out.
  Result<Bytes> get(std::string_view key, std::chrono::milliseconds timeout) override;
  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override;
  /// True for stores in this process, in a file of a local file system, and at a loopback address.
  [[nodiscard]] bool loopback() const override { return loopback_; }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  bool loopback_;
};

}  // namespace tensorferry
