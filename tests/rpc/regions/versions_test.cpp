// Published versions: what subscribers see of updates, deltas, leases, relays and endings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <optional>
#include <random>
#include <thread>

#include "agent/rendezvous/memory_store.h"
#include "agent/rendezvous/tcp_store.h"
#include "tests/agent/patience.h"
#include "tests/channels/shm_maps.h"
#include "tests/rpc/regions/version_agents.h"

namespace tensorferry::testing {
namespace {

using regions::ByteRange;
using regions::HeldVersion;
using regions::VersionStore;
using ::testing::HasSubstr;

TEST(VersionStores, AVersionHasTheBytesOfItsUpdateWhateverTheImageHadBefore) {
  TestSet set({1, 4096, 100'000, 0, 7, 65'536});
  auto layout = set.layout();
  regions::lay_out(layout);
  VersionStore store(layout, {3});
  std::mt19937 random(11);
  std::vector<std::pair<regions::VersionLease, TestSet>> held;
  for (int round = 0; round < 400; ++round) {
    for (int change = 0; change < 3; ++change) {
      auto& tensor = set.bytes[random() % set.bytes.size()];
      if (!tensor.empty()) tensor[random() % tensor.size()] = static_cast<std::byte>(random());
    }
    const auto pointers = set.pointers();
    const auto version = store.update({pointers}, Clock().now(), {});
    ASSERT_TRUE(version.ok()) << version.status().text();
    const auto current = store.current();
    ASSERT_EQ(current->version, *version);
    ASSERT_TRUE(set.is(current->memory.data, layout));
    EXPECT_EQ(regions::block_hashes({current->memory.data, layout.bytes}, layout.block), current->hashes);
    for (const auto& [lease, then] : held) ASSERT_TRUE(then.is(lease->memory.data, layout));
    held.emplace_back(current, set);
    if (held.size() > 1) held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
  }
  EXPECT_LE(store.images(), 3U);
}

TEST(VersionStores, TellWhichBlocksChanged) {
  TestSet set({64 << 10, 64 << 10});
  auto layout = set.layout();
  regions::lay_out(layout);
  VersionStore store(layout, {3});
  const auto update = [&] { return *store.update({set.pointers()}, Clock().now(), {}); };
  ASSERT_EQ(update(), 1U);
  set.bytes[0][5000] = std::byte{1};
  ASSERT_EQ(update(), 2U);
  set.bytes[1][0] = std::byte{1};
  ASSERT_EQ(update(), 3U);
  using Ranges = std::vector<ByteRange>;
  EXPECT_EQ(store.changes(2, 1), (Ranges{{4096, 4096}}));
  EXPECT_EQ(store.changes(3, 1), (Ranges{{4096, 4096}, {64 << 10, 4096}}));
  EXPECT_EQ(store.changes(3, 3), Ranges{});
  EXPECT_EQ(store.changes(3, 0), std::nullopt);
  EXPECT_EQ(store.changes(3, 77), std::nullopt);
  for (std::size_t block = 0; block < 9; ++block) set.bytes[1][block * 4096] = std::byte{9};
  ASSERT_EQ(update(), 4U);
  EXPECT_EQ(store.changes(4, 3), (Ranges{{64 << 10, 64 << 10}})) << "more than half of a tensor: all of it";
}

TEST(VersionStores, AnUpdateTakesWhatTheMarksNameAndLeavesTheRest) {
  TestSet set({1, 4096, 100'000, 0, 7, 65'536});
  auto layout = set.layout();
  regions::lay_out(layout);
  VersionStore store(layout, {3});
  std::mt19937 random(13);
  // Of the current version. What lies between the tensors is not looked at.
  std::vector<std::byte> expected(layout.bytes);
  std::vector<std::pair<regions::VersionLease, std::vector<std::byte>>> held;
  const auto each_byte = [&](const auto& visit) {
    for (std::size_t i = 0; i < set.bytes.size(); ++i) {
      for (std::size_t at = 0; at < set.bytes[i].size(); ++at) visit(i, at, layout.pieces[i].offset + at);
    }
  };
  const auto is = [&](const regions::VersionLease& lease, const std::vector<std::byte>& bytes) {
    bool same = true;
    each_byte([&](std::size_t, std::size_t, std::size_t place) { same &= lease->memory.data[place] == bytes[place]; });
    return same;
  };
  for (int round = 0; round < 200; ++round) {
    for (auto& tensor : set.bytes) {
      for (std::size_t change = 0; !tensor.empty() && change < 3; ++change) {
        tensor[random() % tensor.size()] = static_cast<std::byte>(random());
      }
    }
    regions::BlockMarks look(layout.blocks());
    for (auto& mark : look) mark = random() % 4 == 0 ? 1 : 0;
    auto pointers = set.pointers();
    for (std::size_t i = 0; i < pointers.size(); ++i) {
      if (random() % 8 == 0 && round != 0) pointers[i] = nullptr;
    }
    each_byte([&](std::size_t i, std::size_t at, std::size_t place) {
      if (round == 0 || (look[place / layout.block] != 0 && pointers[i] != nullptr)) expected[place] = set.bytes[i][at];
    });
    ASSERT_TRUE(store.update({pointers, &look}, Clock().now(), {}).ok());  // the first takes everything
    const auto current = store.current();
    ASSERT_TRUE(is(current, expected)) << round;
    EXPECT_EQ(regions::block_hashes({current->memory.data, layout.bytes}, layout.block), current->hashes);
    for (const auto& [lease, then] : held) ASSERT_TRUE(is(lease, then));
    held.emplace_back(current, expected);
    if (held.size() > 1) held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
  }
  const auto before = store.current();
  regions::BlockMarks one(layout.blocks());
  regions::mark(one, layout, {layout.pieces[2].offset + 4096, 1});
  for (auto& byte : set.bytes[2]) byte ^= std::byte{1};
  ASSERT_TRUE(store.update({set.pointers(), &one}, Clock().now(), {}).ok());
  const auto block = (layout.pieces[2].offset + 4096) / layout.block * layout.block;
  EXPECT_EQ(store.changes(before->version + 1, before->version), (std::vector<ByteRange>{{block, layout.block}}));
}

TEST(VersionStores, AnUpdateWaitsForAFreeImage) {
  TestSet set({5000});
  auto layout = set.layout();
  regions::lay_out(layout);
  VersionStore store(layout, {2});
  ASSERT_TRUE(store.update({set.pointers()}, Clock().now(), {}).ok());
  auto lease = store.current();
  ASSERT_TRUE(store.update({set.pointers()}, Clock().now(), {}).ok());
  const auto full = store.update({set.pointers()}, Clock().now(), [] { return "\"reader\""; });
  EXPECT_EQ(full.status().code(), Code::resource_exhausted);
  EXPECT_THAT(full.status().text(), HasSubstr("all 2 images of the publication are read, by \"reader\""));
  store.abandon(lease);
  EXPECT_TRUE(store.update({set.pointers()}, Clock().now(), {}).ok());
}

/// How a subscriber gets versions.
struct VersionWay {
  std::string host;  // of the subscriber
  Ways ways;
  std::string carried;
  std::string name;
};
class Versions : public ::testing::TestWithParam<VersionWay> {
 protected:
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  VersionAgent publisher{store, "trainer", "", GetParam().ways};
  VersionAgent subscriber{store, "sampler", GetParam().host, GetParam().ways};
};
INSTANTIATE_TEST_SUITE_P(, Versions,
                         ::testing::Values(VersionWay{"", {"ring", ""}, "mapped", "mapped"},
                                           VersionWay{"other", {"tcp", ""}, "copied", "copied"}),
                         [](const auto& each) { return each.param.name; });

TEST_P(Versions, ArriveWholeAndStayAsTheyAre) {
  TestSet set({100'000, 3, 0, 200'000});
  const auto publication = *publisher.publications->publish("policy", set.layout(), {3});
  const auto subscription = subscriber.subscriptions->subscribe("trainer", "policy", soon());
  ASSERT_TRUE(subscription.ok()) << subscription.status().text();
  EXPECT_EQ((*subscription)->carried(), GetParam().carried);
  EXPECT_EQ((*subscription)->latest(soon()).status().code(), Code::not_found);
  const auto layout = (*subscription)->layout();
  HeldVersion before;
  for (unsigned version = 1; version <= 20; ++version) {
    set.fill(version);
    ASSERT_EQ(*publication->update({set.pointers()}, Clock().now() + long_enough), version);
    const auto view = (*subscription)->wait(version - 1, soon());
    ASSERT_TRUE(view.ok()) << view.status().text();
    EXPECT_EQ((*view)->version, version);
    EXPECT_TRUE(set.is((*view)->data, layout));
    if (before) {
      TestSet then({100'000, 3, 0, 200'000});
      then.fill(version - 1);
      EXPECT_TRUE(then.is(before->data, layout));
    }
    before = *view;
  }
  EXPECT_LE(publication->leases(), 2U);
}

TEST_P(Versions, OnlyChangedBlocksTravel) {
  TestSet set({1 << 20, 1 << 20});
  const auto publication = *publisher.publications->publish("policy", set.layout(4096), {3});
  const auto subscription = *subscriber.subscriptions->subscribe("trainer", "policy", soon());
  ASSERT_TRUE(publication->update({set.pointers()}, Clock().now()).ok());
  auto view = *subscription->latest(soon());
  for (int round = 0; round < 6; ++round) {
    set.bytes[0][static_cast<std::size_t>(round) * 10'000] = std::byte{7};
    const auto base = view->version;
    const auto epoch = view->epoch;
    ASSERT_TRUE(publication->update({set.pointers()}, Clock().now() + long_enough).ok());
    view = *subscription->latest(soon());
    EXPECT_TRUE(set.is(view->data, subscription->layout()));
    const auto changes = subscription->changes(*view, base, epoch, soon());
    ASSERT_TRUE(changes.has_value());
    EXPECT_EQ(*changes, (std::vector<ByteRange>{{static_cast<std::uint64_t>(round) * 10'000 / 4096 * 4096, 4096}}));
    EXPECT_EQ(subscription->changes(*view, base, epoch + 1, soon()), std::nullopt);
  }
  const std::uint64_t travelled = GetParam().carried == "copied" ? (2U << 20) + 6 * 4096U : 0;
  EXPECT_EQ(subscription->fetched(), travelled) << "the first version whole, and one block of each of the next six";
}

TEST_P(Versions, AWaitEndsWithAnUpdateATimeOutOrTheEndOfThePublication) {
  TestSet set({1000});
  const auto publication = *publisher.publications->publish("policy", set.layout(), {3});
  const auto subscription = *subscriber.subscriptions->subscribe("trainer", "policy", soon());
  EXPECT_EQ(subscription->wait(0, {Clock().now() + Milliseconds(20), {}}).status().code(), Code::deadline_exceeded);
  std::thread updating([&] { EXPECT_TRUE(publication->update({set.pointers()}, Clock().now()).ok()); });
  EXPECT_EQ((*subscription->wait(0, soon()))->version, 1U);
  updating.join();
  std::thread ending([&] { publisher.publications->withdraw("policy"); });
  EXPECT_EQ(subscription->wait(1, soon()).status().code(), Code::not_found);
  ending.join();
}

TEST_P(Versions, AHeldVersionOutlivesItsPublisher) {
  TestSet set({100'000});
  set.fill(3);
  const auto publication = *publisher.publications->publish("policy", set.layout(), {3});
  ASSERT_TRUE(publication->update({set.pointers()}, Clock().now()).ok());
  const auto subscription = *subscriber.subscriptions->subscribe("trainer", "policy", soon());
  const auto view = *subscription->latest(soon());
  Status waited;
  std::thread waiting([&] { waited = subscription->wait(1, soon()).status(); });
  ASSERT_TRUE(eventually([&] { return publication->waiting() == 1; }));
  publisher.leave();
  waiting.join();
  EXPECT_EQ(waited.code(), Code::connection_lost) << waited.text();
  EXPECT_TRUE(set.is(view->data, subscription->layout()));
}

TEST_P(Versions, OfAPublicationThatReplacesAnotherAreNotTakenForTheOlderOnes) {
  TestSet set({1000}), larger({5000});
  auto publication = *publisher.publications->publish("policy", set.layout(), {3});
  ASSERT_TRUE(publication->update({set.pointers()}, Clock().now()).ok());
  const auto subscription = *subscriber.subscriptions->subscribe("trainer", "policy", soon());
  const auto before = *subscription->latest(soon());
  publisher.publications->withdraw("policy");
  publication = *publisher.publications->publish("policy", larger.layout(), {3});
  larger.fill(8);
  ASSERT_TRUE(publication->update({larger.pointers()}, Clock().now()).ok());
  const auto after = subscription->wait(1, soon());
  ASSERT_TRUE(after.ok()) << after.status().text();
  EXPECT_NE((*after)->epoch, before->epoch);
  EXPECT_EQ((*after)->version, 1U);
  EXPECT_TRUE(larger.is((*after)->data, *(*after)->layout));
  EXPECT_TRUE(set.is(before->data, *before->layout));
}

/// Returns how many images of so many bytes this process has mapped.
std::size_t images_mapped(std::size_t bytes) {
  std::size_t count = 0;
  for_shared_mappings([&](auto begin, auto end) { count += end - begin == (bytes + 4095) / 4096 * 4096 ? 1U : 0U; });
  return count;
}

TEST(VersionImages, AreUnmappedOnceTheirPublicationIsWithdrawnAndNoViewIsHeld) {
  const auto store = std::make_shared<MemoryStore>();
  VersionAgent publisher(store, "trainer", "", {"ring", "shm,basic"});
  VersionAgent subscriber(store, "sampler", "", {"ring", "shm,basic"});
  TestSet set({300'032});
  const auto mapped = [] { return images_mapped(300'032); };
  std::vector<std::shared_ptr<regions::Publication>> kept;  // the program may go on to hold them
  kept.push_back(*publisher.publications->publish("policy", set.layout(), {3}));
  const auto subscription = *subscriber.subscriptions->subscribe("trainer", "policy", soon());
  for (unsigned round = 1; round <= 5; ++round) {
    set.fill(round);
    std::vector<HeldVersion> views;
    for (std::uint64_t version = 1; version <= 2; ++version) {
      ASSERT_EQ(*kept.back()->update({set.pointers()}, Clock().now()), version);
      const auto view = subscription->latest(soon());
      ASSERT_TRUE(view.ok()) << view.status().text();
      views.push_back(*view);
    }
    EXPECT_EQ(mapped(), 4U) << "two images, at both ends";
    publisher.publications->withdraw("policy");
    EXPECT_EQ(kept.back()->leases(), 0U);
    EXPECT_EQ(kept.back()->store().last_version(), 2U);
    EXPECT_EQ(kept.back()->update({set.pointers()}, Clock().now()).status().code(), Code::not_found);
    EXPECT_TRUE(eventually([&] { return mapped() == 2; })) << mapped() << " are, and there are two views";
    for (const auto& view : views) EXPECT_TRUE(set.is(view->data, *view->layout));
    views.clear();
    EXPECT_TRUE(eventually([&] { return mapped() == 0; })) << mapped();
    kept.push_back(*publisher.publications->publish("policy", set.layout(), {3}));
  }
}

TEST(VersionRelays, OneSubscriberOfAHostFetchesForTheOthers) {
  const auto store = std::make_shared<MemoryStore>();
  VersionAgent publisher(store, "trainer", "A");
  TestSet set({1 << 20});
  const auto publication = *publisher.publications->publish("policy", set.layout(), {3});
  set.fill(1);
  ASSERT_TRUE(publication->update({set.pointers()}, Clock().now()).ok());
  auto first = std::make_unique<VersionAgent>(store, "first", "B");
  VersionAgent second(store, "second", "B");
  VersionAgent third(store, "third", "B");
  auto fetching = *first->subscriptions->subscribe("trainer", "policy", soon());
  const auto mapping = *second.subscriptions->subscribe("trainer", "policy", soon());
  const auto other = *third.subscriptions->subscribe("trainer", "policy", soon());
  EXPECT_EQ(fetching->carried(), "copied");
  EXPECT_EQ(mapping->carried(), "mapped from \"first\"");
  for (unsigned version = 2; version < 10; ++version) {
    set.fill(version);
    ASSERT_TRUE(publication->update({set.pointers()}, Clock().now() + long_enough).ok());
    const auto view = mapping->wait(version - 1, soon());
    ASSERT_TRUE(view.ok()) << view.status().text();
    EXPECT_EQ((*view)->version, version);
    EXPECT_TRUE(set.is((*view)->data, mapping->layout()));
    EXPECT_TRUE(set.is((*other->latest(soon()))->data, mapping->layout()));
  }
  EXPECT_EQ(mapping->fetched(), 0U);
  EXPECT_EQ(other->fetched(), 0U);
  EXPECT_GE(fetching->fetched(), 8U << 20);
  // The relay leaves: another subscriber takes its place.
  fetching.reset();
  first.reset();
  set.fill(99);
  ASSERT_TRUE(publication->update({set.pointers()}, Clock().now() + long_enough).ok());
  const auto view = mapping->wait(9, soon());
  ASSERT_TRUE(view.ok()) << view.status().text();
  EXPECT_TRUE(set.is((*view)->data, mapping->layout()));
}

TEST(VersionLeases, AreBoundedAndEndWithTheSubscriber) {
  const auto store = std::make_shared<MemoryStore>();
  VersionAgent publisher(store, "trainer"), hostile(store, "hostile");
  publisher.visitors->set_patience(std::chrono::hours(1));
  TestSet set({10'000});
  const auto publication = *publisher.publications->publish("policy", set.layout(), {2});
  ASSERT_TRUE(publication->update({set.pointers()}, Clock().now()).ok());
  const auto send = [&](const regions::VersionMessage& message) {
    return call_sync(*hostile.agent, "trainer", regions::version_function, {encode(message), {}, {}, {}});
  };
  const auto told = send(regions::SubscribeTo{1, "policy", "", false});
  ASSERT_TRUE(told.ok()) << told.status().text();
  const auto epoch = decode<regions::Subscribed>(told->payload)->epoch;
  std::uint64_t lease = 0;
  Code last = Code::ok;
  for (int each = 0; each < 100 && last == Code::ok; ++each) {
    const auto acquired = send(regions::AcquireVersion{1, "policy", 0, false, false, {}, 0, epoch});
    last = acquired.status().code();
    if (acquired.ok()) lease = decode<regions::Acquired>(acquired->payload)->lease;
  }
  EXPECT_EQ(last, Code::resource_exhausted);
  EXPECT_EQ(publication->leases(), 64U);
  EXPECT_EQ(send(regions::AcquireVersion{1, "policy", 0, false, false, {}, 0, epoch + 1}).status().code(),
            Code::agent_closed);
  ASSERT_TRUE(send(regions::AcquireVersion{1, "policy", 0, false, false, {lease}, ~0ULL, epoch}).ok());
  EXPECT_EQ(publication->leases(), 2U);
  using Ranges = std::vector<ByteRange>;
  for (const auto& ranges : {Ranges{{0, 1ULL << 40}}, Ranges{{~0ULL, 2}}, Ranges(10'000, {0, 10'000})}) {
    EXPECT_EQ(send(regions::FetchRanges{1, "policy", lease, ranges}).status().code(), Code::invalid_argument);
  }
  EXPECT_EQ(send(regions::FetchRanges{1, "policy", lease + 100, {{0, 1}}}).status().code(), Code::not_found);
  const auto nothing = send(regions::FetchRanges{1, "policy", lease, {{0, 0}, {64, 0}}});
  ASSERT_TRUE(nothing.ok()) << nothing.status().text();
  EXPECT_EQ(nothing->buffers.at(0).bytes, 0U);

  const auto most = regions::Publication::most_waiting;
  std::vector<Call> waits;
  for (std::size_t each = 0; each < most + 8; ++each) {
    Message message{
        encode(regions::VersionMessage(regions::AcquireVersion{1, "policy", 1, false, true, {lease}, 0, epoch})),
        {},
        {},
        {}};
    waits.push_back(hostile.agent->call("trainer", regions::version_function, std::move(message),
                                        within(std::chrono::seconds(300))));
  }
  const auto refused = [](const Call& call) { return call.done(); };
  EXPECT_TRUE(eventually([&] { return std::ranges::count_if(waits, refused) == 8; }, std::chrono::seconds(60)));
  EXPECT_EQ(publication->waiting(), most);
  hostile.leave();
  publisher.visitors->set_patience(Milliseconds(0));
  ASSERT_TRUE(publication->update({set.pointers()}, Clock().now() + std::chrono::seconds(60)).ok());
  EXPECT_EQ(publication->leases(), 0U) << "they end at an update, also if their subscriber has never attended";
  EXPECT_EQ(publication->waiting(), 0U);
}

TEST(VersionLeases, EndIfTheVisitEndsBeforeTheAnswer) {
  const auto store = std::make_shared<MemoryStore>();
  VersionAgent publisher(store, "trainer"), subscriber(store, "sampler");
  TestSet set({10'000});
  auto layout = set.layout();
  regions::lay_out(layout);
  const auto versions = std::make_shared<VersionStore>(layout, VersionStore::Options{2});
  ASSERT_TRUE(versions->update({set.pointers()}, Clock().now(), {}).ok());
  const auto leave = [&](std::uint64_t, bool, const auto&, auto) {
    const WaitInHandler waiting;
    subscriber.visits->close();
    EXPECT_TRUE(eventually([&] { return publisher.visitors->size() == 0; }));
    return Status();
  };
  const auto publication = *publisher.publications->relay("policy", versions, 1, leave);
  const auto subscription = *subscriber.subscriptions->subscribe("trainer", "policy", soon());
  EXPECT_EQ(subscription->latest(soon()).status().code(), Code::connection_lost);
  EXPECT_EQ(publication->leases(), 0U);
  for (int version = 2; version < 5; ++version) {
    EXPECT_TRUE(versions->update({set.pointers()}, Clock().now(), {}).ok()) << "no image is leased";
  }
}

/// Kills, with processes. A child publishes or reads until it is killed; the parent's port comes by a pipe.
class VersionKills : public ::testing::Test {
 protected:
  static constexpr std::size_t words = 40'000;
  template <class Life>
  pid_t fork_with(int& to, Life life) {
    int pipe[2];
    EXPECT_EQ(::pipe(pipe), 0);
    const auto child = ::fork();
    if (child == 0) {
      std::uint16_t port = 0;
      if (::read(pipe[0], &port, sizeof port) != sizeof port) ::_exit(1);
      life(*connect_tcp_store("127.0.0.1", port, "", long_enough));
      ::_exit(0);
    }
    ::close(pipe[0]);
    to = pipe[1];
    return child;
  }
  /// Returns whether all words of the image are the same number.
  static bool whole(const std::byte* image) {
    std::uint64_t first = 0;
    std::memcpy(&first, image, sizeof first);
    for (std::size_t i = 1; i < words; ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, image + i * sizeof word, sizeof word);
      if (word != first) return false;
    }
    return true;
  }
  static int rounds() {
    return std::max(21, testing::rounds(10'000) / 5);  // of each of five tests: 105 in all, or 10,000
  }
  static void publish_for_ever(const std::shared_ptr<Store>& store, const std::string& name) {
    VersionAgent publisher(store, name);
    TestSet set({words * sizeof(std::uint64_t)});
    const auto publication = *publisher.publications->publish("policy", set.layout(), {3});
    for (std::uint64_t number = 1;; ++number) {
      for (std::size_t i = 0; i < words; ++i) {
        std::memcpy(set.bytes[0].data() + i * sizeof number, &number, sizeof number);
      }
      (void)publication->update({set.pointers()}, Clock().now() + std::chrono::seconds(1));
    }
  }
  /// Publishes versions, each full of its number, on a thread, until it is destroyed.
  struct Updating {
    explicit Updating(const VersionAgent& publisher)
        : publication(
              *publisher.publications->publish("policy", TestSet({words * sizeof(std::uint64_t)}).layout(), {3})),
          thread([this] {
            TestSet set({words * sizeof(std::uint64_t)});
            for (std::uint64_t number = 1; !ended; ++number) {
              for (std::size_t i = 0; i < words; ++i) {
                std::memcpy(set.bytes[0].data() + i * sizeof number, &number, sizeof number);
              }
              const auto version = publication->update({set.pointers()}, Clock().now() + long_enough);
              EXPECT_TRUE(version.ok()) << version.status().text();
            }
          }) {}
    ~Updating() {
      ended = true;
      thread.join();
    }
    const std::shared_ptr<regions::Publication> publication;
    std::atomic<bool> ended = false;
    std::thread thread;
  };
  static void read_for_ever(const std::shared_ptr<Store>& store, const std::string& name, const std::string& host) {
    VersionAgent reader(store, name, host);
    for (std::uint64_t version = 0;;) {
      const auto subscription = reader.subscriptions->subscribe("trainer", "policy", soon());
      if (!subscription.ok()) continue;
      const auto view = (*subscription)->wait(version, soon());
      if (!view.ok()) continue;
      if (!whole((*view)->data)) ::_exit(3);
      version = (*view)->version;
    }
  }
};

// One child dies at a random moment of each round; the parent is the other side, and goes on through all rounds.
TEST_F(VersionKills, TheImagesOfAPublisherThatIsKilledAreUnmappedOnceNoViewIsHeld) {
  std::vector<std::pair<pid_t, int>> children(6);
  for (std::size_t i = 0; i < children.size(); ++i) {
    const auto name = "trainer" + std::to_string(i);
    children[i].first = fork_with(children[i].second, [name](const auto& store) { publish_for_ever(store, name); });
  }
  const auto server = std::move(*TcpStoreServer::listen("127.0.0.1", 0, ""));
  const auto port = server->port();
  VersionAgent reader(*connect_tcp_store("127.0.0.1", port, "", long_enough), "reader");
  const auto mapped = [] { return images_mapped(words * sizeof(std::uint64_t)); };
  std::vector<std::shared_ptr<regions::Subscription>> kept;
  for (std::size_t i = 0; i < children.size(); ++i) {
    ASSERT_EQ(::write(children[i].second, &port, sizeof port), static_cast<ssize_t>(sizeof port));
    Result<std::shared_ptr<regions::Subscription>> subscription = Status(Code::not_found, "");
    ASSERT_TRUE(eventually(
        [&] {
          return (subscription = reader.subscriptions->subscribe("trainer" + std::to_string(i), "policy", soon())).ok();
        },
        long_enough));
    kept.push_back(*subscription);
    HeldVersion held;
    for (int count = 0; count < 6; ++count) {
      const auto view = (*subscription)->wait(held ? held->version : 0, soon());
      ASSERT_TRUE(view.ok()) << view.status().text();
      held = *view;
    }
    EXPECT_GT(mapped(), 1U);
    ::kill(children[i].first, SIGKILL);
    ASSERT_EQ(::waitpid(children[i].first, nullptr, 0), children[i].first);
    ::close(children[i].second);
    EXPECT_TRUE(eventually([&] { return mapped() == 1; })) << mapped() << " are, and there is one view";
    EXPECT_TRUE(whole(held->data));
    held = nullptr;
    EXPECT_TRUE(eventually([&] { return mapped() == 0; })) << mapped();
  }
}

TEST_F(VersionKills, AnUpdateWaitsForNoSubscriberThatHasStopped) {
  int pipe = -1;
  const auto child = fork_with(pipe, [](const auto& store) { read_for_ever(store, "reader", ""); });
  const auto server = std::move(*TcpStoreServer::listen("127.0.0.1", 0, ""));
  const auto port = server->port();
  VersionAgent publisher(*connect_tcp_store("127.0.0.1", port, "", long_enough), "trainer");
  TestSet set({words * sizeof(std::uint64_t)});
  const auto publication = *publisher.publications->publish("policy", set.layout(), {4});
  ASSERT_EQ(::write(pipe, &port, sizeof port), static_cast<ssize_t>(sizeof port));
  ASSERT_TRUE(eventually([&] { return publication->waiting() == 1; }, long_enough));
  send_signal(child, SIGSTOP);
  for (std::uint64_t version = 1; version <= 200; ++version) {
    ASSERT_EQ(*publication->update({set.pointers()}, Clock().now()), version) << "it waits for no image either";
  }
  EXPECT_EQ(publication->waiting(), 0U) << "it was told of the first";
  EXPECT_EQ(publication->leases(), 1U);
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  ::close(pipe);
}

// The child relays to its host until it is killed, and the parent has a reader there, which takes its place.
TEST_F(VersionKills, ARelayThatIsKilledTearsNoVersion) {
  const int count = rounds();
  int relayed = 0;
  for (int done = 0; done < count;) {
    const auto some = static_cast<std::size_t>(std::min(count - done, 64));
    std::vector<std::pair<pid_t, int>> children(some);
    for (std::size_t i = 0; i < some; ++i) {
      children[i].first = fork_with(
          children[i].second, [i](const auto& store) { read_for_ever(store, "relay" + std::to_string(i), "other"); });
    }
    const auto server = std::move(*TcpStoreServer::listen("127.0.0.1", 0, ""));
    const auto port = server->port();
    const auto store = connect_tcp_store("127.0.0.1", port, "", long_enough);
    VersionAgent publisher(*store, "trainer");
    const Updating updating(publisher);
    for (std::size_t i = 0; i < some; ++i, ++done) {
      std::mt19937 random(static_cast<unsigned>(done));
      ASSERT_EQ(::write(children[i].second, &port, sizeof port), static_cast<ssize_t>(sizeof port));
      ASSERT_TRUE(eventually([&] { return updating.publication->leases() > 0; }, long_enough)) << "it relays";
      VersionAgent reader(*store, "reader" + std::to_string(done), "other");
      const auto subscription = *reader.subscriptions->subscribe("trainer", "policy", soon());
      // The publisher may have known the earlier reader as the relay when this child came.
      relayed += subscription->carried() == "mapped from \"relay" + std::to_string(i) + '"' ? 1 : 0;
      std::atomic<bool> killed = false;
      std::thread killing([&, after = random() % 10'000] {
        std::this_thread::sleep_for(std::chrono::microseconds(after));
        ::kill(children[i].first, SIGKILL);
        killed = true;
      });
      HeldVersion last;
      for (bool late = false; !late;) {
        late = killed;
        const auto view = subscription->wait(last ? last->version : 0, soon());
        ASSERT_TRUE(view.ok()) << view.status().text();
        ASSERT_TRUE(whole((*view)->data)) << "seed " << done;
        ASSERT_TRUE(!last || whole(last->data)) << "seed " << done;
        last = *view;
      }
      killing.join();
      int status = 0;
      ASSERT_EQ(::waitpid(children[i].first, &status, 0), children[i].first);
      EXPECT_TRUE(WIFSIGNALED(status)) << "a relay saw a torn version, seed " << done;
      ::close(children[i].second);
      reader.leave();
      EXPECT_TRUE(eventually([&] { return updating.publication->leases() == 0; })) << "both have gone";
    }
  }
  EXPECT_GT(relayed, count / 2);
}

/// By the way that the bytes take to the readers.
class VersionKillsByWay : public VersionKills, public ::testing::WithParamInterface<const char*> {
 protected:
  /// The readers' host; "": the publisher's.
  const std::string host = GetParam() == std::string("copied") ? "other" : "";
};
INSTANTIATE_TEST_SUITE_P(, VersionKillsByWay, ::testing::Values("mapped", "copied"),
                         [](const auto& each) { return std::string(each.param); });

TEST_P(VersionKillsByWay, OfPublishersTearNoVersion) {
  const int count = rounds();
  std::vector<std::pair<pid_t, int>> children(static_cast<std::size_t>(std::min(count, 64)));
  for (int done = 0; done < count;) {
    const auto some = std::min<std::size_t>(children.size(), static_cast<std::size_t>(count - done));
    // Children are forked while this process has one thread.
    for (std::size_t i = 0; i < some; ++i) {
      const auto name = "trainer" + std::to_string(i);
      children[i].first = fork_with(children[i].second, [name](const auto& store) { publish_for_ever(store, name); });
    }
    const auto server = std::move(*TcpStoreServer::listen("127.0.0.1", 0, ""));
    const auto port = server->port();
    VersionAgent reader(*connect_tcp_store("127.0.0.1", port, "", long_enough), "reader", host);
    for (std::size_t i = 0; i < some; ++i, ++done) {
      std::mt19937 random(static_cast<unsigned>(done));
      ASSERT_EQ(::write(children[i].second, &port, sizeof port), static_cast<ssize_t>(sizeof port));
      const auto name = "trainer" + std::to_string(i);
      Result<std::shared_ptr<regions::Subscription>> subscription = Status(Code::not_found, "");
      ASSERT_TRUE(eventually(
          [&] { return (subscription = reader.subscriptions->subscribe(name, "policy", soon())).ok(); }, long_enough));
      std::thread killing([&, after = random() % 15'000] {
        std::this_thread::sleep_for(std::chrono::microseconds(after));
        ::kill(children[i].first, SIGKILL);
      });
      std::uint64_t version = 0;
      HeldVersion last;
      for (;;) {
        const auto view = (*subscription)->wait(version, soon());
        if (!view.ok()) {
          EXPECT_EQ(view.status().code(), Code::connection_lost) << view.status().text();
          break;
        }
        ASSERT_TRUE(whole((*view)->data)) << "seed " << done;
        version = (*view)->version;
        last = *view;
      }
      killing.join();
      EXPECT_TRUE(!last || whole(last->data)) << "seed " << done;
      ASSERT_EQ(::waitpid(children[i].first, nullptr, 0), children[i].first);
      ::close(children[i].second);
    }
  }
}

TEST_P(VersionKillsByWay, OfReadersHarmNeitherThePublisherNorTheOthers) {
  const int count = rounds();
  for (int done = 0; done < count;) {
    const auto some = static_cast<std::size_t>(std::min(count - done, 64));
    std::vector<std::pair<pid_t, int>> children(some);
    for (std::size_t i = 0; i < some; ++i) {
      children[i].first = fork_with(children[i].second, [this, i](const auto& store) {
        read_for_ever(store, "reader" + std::to_string(i), host);
      });
    }
    const auto server = std::move(*TcpStoreServer::listen("127.0.0.1", 0, ""));
    const auto port = server->port();
    const auto store = connect_tcp_store("127.0.0.1", port, "", long_enough);
    VersionAgent publisher(*store, "trainer");
    std::optional<Updating> updating(publisher);
    const auto publication = updating->publication;
    VersionAgent survivor(*store, "survivor");
    const auto subscription = *survivor.subscriptions->subscribe("trainer", "policy", soon());
    std::uint64_t version = 0;
    for (std::size_t i = 0; i < some; ++i, ++done) {
      std::mt19937 random(static_cast<unsigned>(done));
      ASSERT_EQ(::write(children[i].second, &port, sizeof port), static_cast<ssize_t>(sizeof port));
      ASSERT_TRUE(
          eventually([&] { return publication->leases() > 0 && publisher.visitors->size() >= 2; }, long_enough));
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 10'000));
      ::kill(children[i].first, SIGKILL);
      int status = 0;
      ASSERT_EQ(::waitpid(children[i].first, &status, 0), children[i].first);
      EXPECT_TRUE(WIFSIGNALED(status)) << "a reader saw a torn version, seed " << done;
      ::close(children[i].second);
      const auto view = subscription->wait(version, soon());
      ASSERT_TRUE(view.ok()) << view.status().text();
      ASSERT_TRUE(whole((*view)->data)) << "seed " << done;
      version = (*view)->version;
    }
    updating.reset();
    EXPECT_TRUE(eventually([&] { return publisher.visitors->size() == 1; }));
    EXPECT_LE(publication->store().images(), 3U);
  }
}

}  // namespace
}  // namespace tensorferry::testing
