/// A store that counts the operations on another one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "agent/store.h"

namespace tensorferry::testing {

class CountingStore final : public Store {
 public:
  explicit CountingStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}
  Status set(std::string_view key, ByteView value) override {
    ++operations;
    return store_->set(key, value);
  }
  Result<Bytes> get(std::string_view key, std::chrono::milliseconds timeout) override {
    ++operations;
    return store_->get(key, timeout);
  }
  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override {
    ++operations;
    return store_->add(key, amount);
  }
  Status erase(std::string_view key) override {
    ++operations;
    return store_->erase(key);
  }
  [[nodiscard]] bool loopback() const override { return store_->loopback(); }

  std::atomic<int> operations = 0;

 private:
  const std::shared_ptr<Store> store_;
};

}  // namespace tensorferry::testing
