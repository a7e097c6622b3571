#include "rpc/store_adapter.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

namespace tensorferry {
namespace {

using namespace std::chrono_literals;

c10::intrusive_ptr<c10d::TCPStore> tcp_store(bool server, std::uint16_t port) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = server;
  options.waitWorkers = false;
  options.timeout = 10s;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

struct Stores {
  std::string name;
  c10::intrusive_ptr<c10d::Store> one, other;  // two clients of one store
};

class StoreAdapterTest : public testing::TestWithParam<std::string> {
 protected:
  Stores stores() {
    const auto kind = GetParam();
    if (kind == "tcp") {
      auto server = tcp_store(true, 0);
      const auto port = server->getPort();
      return {kind, std::move(server), tcp_store(false, port)};
    }
    if (kind == "file") {
      folder_ = std::filesystem::temp_directory_path() / ("store_adapter_test." + std::to_string(::getpid()));
      std::filesystem::create_directories(folder_);
      const auto path = (folder_ / "store").string();
      return {kind, c10::make_intrusive<c10d::FileStore>(path, 2), c10::make_intrusive<c10d::FileStore>(path, 2)};
    }
    auto hash = c10::make_intrusive<c10d::HashStore>();
    return {kind, c10::make_intrusive<c10d::PrefixStore>("inside", hash),
            c10::make_intrusive<c10d::PrefixStore>("inside", hash)};
  }
  ~StoreAdapterTest() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  std::filesystem::path folder_;
};

TEST_P(StoreAdapterTest, ReturnsTheBytesThatAnotherClientSet) {
  auto [name, one, other] = stores();
  StoreAdapter writer(one), reader(other);
  const std::string bytes("\0one\xff", 5);
  ASSERT_TRUE(writer.set("key", view_of(bytes)).ok());
  auto got = reader.get("key", 1s);
  ASSERT_TRUE(got.ok()) << got.status().text();
  EXPECT_EQ(text_of(*got), bytes);
}

TEST_P(StoreAdapterTest, ChecksAKeyWithoutWaiting) {
  auto [name, one, other] = stores();
  StoreAdapter store(one);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(store.get("nobody", 0ms).status().code(), Code::deadline_exceeded);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

TEST_P(StoreAdapterTest, StopsWaitingAtTheTimeout) {
  auto [name, one, other] = stores();
  StoreAdapter store(one);
  const auto start = std::chrono::steady_clock::now();
  const auto status = store.get("nobody", 200ms).status();
  EXPECT_EQ(status.code(), Code::deadline_exceeded);
  EXPECT_NE(status.what().find("nobody"), std::string::npos);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 150ms);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
}

TEST_P(StoreAdapterTest, OtherCallsContinueWhileOneWaits) {
  auto [name, one, other] = stores();
  StoreAdapter store(one), elsewhere(other);
  auto waiting = std::async(std::launch::async, [&store] { return store.get("late", 60s).ok(); });
  std::this_thread::sleep_for(50ms);
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(store.set("other", view_of("1")).ok());
  EXPECT_EQ(*store.add("counter", 2), 2);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
  ASSERT_TRUE(elsewhere.set("late", view_of("2")).ok());
  EXPECT_TRUE(waiting.get());
}

TEST_P(StoreAdapterTest, AddsForAllClients) {
  auto [name, one, other] = stores();
  StoreAdapter a(one), b(other);
  EXPECT_EQ(*a.add("n", 1), 1);
  EXPECT_EQ(*b.add("n", 5), 6);
  EXPECT_EQ(*a.add("n", 0), 6);
}

TEST_P(StoreAdapterTest, ErasesValuesAndCountersForAllClients) {
  auto [name, one, other] = stores();
  StoreAdapter a(one), b(other);
  ASSERT_TRUE(a.set("key", view_of("value")).ok());
  EXPECT_EQ(*a.add("n", 3), 3);
  for (const char* key : {"key", "n", "never set"}) EXPECT_TRUE(b.erase(key).ok()) << key;
  EXPECT_EQ(a.get("key", 0ms).status().code(), Code::deadline_exceeded);
  EXPECT_EQ(*a.add("n", 1), 1);
}

/// A store of another kind, which cannot delete.
class KeepsKeys final : public c10d::Store {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<KeepsKeys>(); }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override { values_[key] = value; }
  std::vector<std::uint8_t> get(const std::string& key) override { return values_.at(key); }
  std::int64_t add(const std::string&, std::int64_t value) override { return value; }
  bool deleteKey(const std::string&) override { throw std::runtime_error("deleteKey is not supported"); }
  bool check(const std::vector<std::string>& keys) override { return values_.contains(keys.front()); }
  std::int64_t getNumKeys() override { return 0; }
  void wait(const std::vector<std::string>&) override {}
  void wait(const std::vector<std::string>&, const std::chrono::milliseconds&) override {}

 private:
  std::map<std::string, std::vector<std::uint8_t>> values_;
};

TEST(StoreAdapter, KeepsTheKeysOfAStoreThatCannotDelete) {
  StoreAdapter store(c10::make_intrusive<KeepsKeys>());
  ASSERT_TRUE(store.set("key", view_of("value")).ok());
  EXPECT_TRUE(store.erase("key").ok());
  EXPECT_TRUE(store.get("key", 0ms).ok());
}

TEST_P(StoreAdapterTest, ServesOnlyThisHost) {
  auto [name, one, other] = stores();
  EXPECT_TRUE(StoreAdapter(one).loopback());
}

TEST(StoreAdapter, ServesOtherHostsTooIfNobodyKnowsWhoHasMountedItsFile) {
  const auto path = std::filesystem::temp_directory_path() / ("store_adapter_test.gone." + std::to_string(::getpid()));
  const auto store = c10::make_intrusive<c10d::FileStore>(path.string(), -1);
  EXPECT_TRUE(StoreAdapter(store).loopback());
  std::filesystem::remove(path);
  EXPECT_FALSE(StoreAdapter(store).loopback());
}

INSTANTIATE_TEST_SUITE_P(C10d, StoreAdapterTest, testing::Values("tcp", "file", "prefix"),
                         [](const auto& tested) { return tested.param; });

TEST(StoreAdapter, ReportsALostStore) {
  auto server = tcp_store(true, 0);
  const auto port = server->getPort();
  auto client = tcp_store(false, port);
  client->setTimeout(500ms);
  StoreAdapter store(client);
  ASSERT_TRUE(store.set("key", view_of("1")).ok());
  server.reset();
  Status status;
  for (int i = 0; i < 10 && status.ok(); ++i) status = store.set("key", view_of("2"));
  EXPECT_EQ(status.code(), Code::connection_lost);
  EXPECT_EQ(status.what().find("the rendezvous host at 127.0.0.1:" + std::to_string(port) + " is gone ("), 0U);
  EXPECT_EQ(status.what().find('\n'), std::string::npos);
}

}  // namespace
}  // namespace tensorferry
