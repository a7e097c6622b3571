#include "agent/rendezvous/directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <set>
#include <thread>

#include "agent/rendezvous/memory_store.h"
#include "agent/rendezvous/tcp_store.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using tensorferry::testing::long_enough;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const Directory::Alive always_alive = [](const Record&) { return true; };
const Directory::Alive always_dead = [](const Record&) { return false; };
// For calls that must find no other agent in the slot.
const Directory::Alive unasked = [](const Record& record) {
  ADD_FAILURE() << "asked about " << record.name;
  return true;
};

Record record_of(const std::string& name, int rank = -1) {
  auto record = describe_this_process();
  record.name = name;
  record.rank = rank;
  record.unix_address = "@" + name;
  record.tcp_addresses = {"127.0.0.1:7000", "[::1]:7000"};
  return record;
}

std::string what(const Status& status) { return std::string(status.what()); }

// ---- Records

TEST(Record, OfThisProcessHasItsNameAndAddresses) {
  const auto record = describe_this_process(), again = describe_this_process();
  EXPECT_EQ(record.pid, ::getpid());
  EXPECT_EQ(record.uid, ::geteuid());
  EXPECT_NE(record.incarnation, 0U);
  EXPECT_NE(record.incarnation, again.incarnation);
  EXPECT_FALSE(record.boot_id.empty());
  EXPECT_EQ(record.boot_id, again.boot_id);
}

TEST(Record, RoundTripsWithAndWithoutASignature) {
  auto record = record_of("trainer0", 3);
  record.left = true;
  for (const auto& key : {Key(), Key::random()}) {
    const auto got = decode_record(encode_record(record, key, "job/rec/n/trainer0/7"), key, "job/rec/n/trainer0/7");
    ASSERT_TRUE(got.ok()) << got.status().text();
    EXPECT_EQ(*got, record);
  }
}

TEST(Record, IsRefusedWhenItsSignatureIsWrong) {
  const auto key = Key::random();
  const auto record = record_of("trainer0");
  const std::string place = "job/rec/n/trainer0/7";
  const auto good = encode_record(record, key, place);
  const auto code = [&](ByteView bytes, const Key& by, std::string_view at) {
    return decode_record(bytes, by, at).status().code();
  };
  EXPECT_EQ(code(good, Key::random(), place), Code::unauthenticated);
  EXPECT_EQ(code(good, key, "job/rec/n/trainer1/7"), Code::unauthenticated);   // moved to another name
  EXPECT_EQ(code(good, key, "job/rec/n/trainer0/8"), Code::unauthenticated);   // an old one put in a new one's place
  EXPECT_EQ(code(good, key, "job2/rec/n/trainer0/7"), Code::unauthenticated);  // carried to another job
  EXPECT_EQ(code(encode_record(record, Key(), place), key, place), Code::unauthenticated);
  for (std::size_t at = 1; at < good.size(); ++at) {
    auto bad = good;
    bad[at] ^= std::byte{1};
    EXPECT_EQ(code(bad, key, place), Code::unauthenticated) << at;
  }
  EXPECT_EQ(code(good, Key(), place), Code::ok);  // no key here: nothing to check it with
}

TEST(Record, OfAnotherJobWithTheSameKeyIsRefused) {
  const auto key = Key::random();
  const auto theirs = std::make_shared<MemoryStore>();
  const auto record = record_of("server");
  ASSERT_TRUE(Directory(theirs, "theirs", key).join(record, [](const Record&) { return false; }).ok());
  const auto replayed = theirs->get("theirs/rec/n/server/1", milliseconds(0));
  ASSERT_TRUE(replayed.ok());
  const auto store = std::make_shared<MemoryStore>();
  ASSERT_TRUE(store->add("ours/gen/n/server", 1).ok());
  ASSERT_TRUE(store->set("ours/rec/n/server/1", *replayed).ok());
  EXPECT_EQ(Directory(store, "ours", key).find("server", milliseconds(0)).status().code(), Code::unauthenticated);
  EXPECT_TRUE(Directory(theirs, "theirs", key).find("server", milliseconds(0)).ok());
}

TEST(Record, ThatIsTruncatedOrMalformedIsRefused) {
  const auto good = encode_record(record_of("trainer0"), Key(), "s");
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_EQ(decode_record(ByteView(good).first(size), Key(), "s").status().code(), Code::protocol_error) << size;
  }
  auto longer = good;
  longer.push_back(std::byte{9});  // a later release's field
  EXPECT_TRUE(decode_record(longer, Key(), "s").ok());
  const auto refused = [](Record record) {
    return decode_record(encode_record(record, Key(), "s"), Key(), "s").status().code() == Code::protocol_error;
  };
  auto bad = record_of("");
  EXPECT_TRUE(refused(bad));
  bad = record_of("line\nbreak");
  EXPECT_TRUE(refused(bad));
  bad = record_of("a");
  bad.incarnation = 0;
  EXPECT_TRUE(refused(bad));
  bad = record_of("a", -2);
  EXPECT_TRUE(refused(bad));
  bad = record_of("a");
  bad.tcp_addresses = {"no port"};
  EXPECT_TRUE(refused(bad));
  bad.tcp_addresses.assign(17, "127.0.0.1:7000");
  EXPECT_TRUE(refused(bad));
  bad = record_of("a");
  bad.version_min = 2;
  EXPECT_TRUE(refused(bad));
}

TEST(Record, TellsWhetherAUnixSocketMayReachThePeer) {
  const auto mine = record_of("a");
  auto theirs = record_of("b");
  EXPECT_TRUE(may_share_unix(mine, theirs));
  theirs.net_namespace += 1;
  EXPECT_FALSE(may_share_unix(mine, theirs));
  theirs.unix_address = "/run/shared/b.sock";
  EXPECT_TRUE(may_share_unix(mine, theirs));  // a container that shares the folder
  theirs.boot_id = "another host";
  EXPECT_FALSE(may_share_unix(mine, theirs));
  theirs = record_of("c");
  theirs.unix_address = "";
  EXPECT_FALSE(may_share_unix(mine, theirs));
}

TEST(Name, IsShortAndPrintable) {
  EXPECT_TRUE(check_name("trainer/0 of host:1 \xc3\xa4").ok());
  for (const auto& bad : {std::string(), std::string(256, 'x'), std::string("a\nb"), std::string("a\0b", 3),
                          std::string("a\u009b2J"), std::string("a\u202egnp.exe"), std::string("a\xff")}) {
    EXPECT_EQ(check_name(bad).code(), Code::invalid_argument) << bad;
  }
}

// ---- The directory, with both stores

class DirectoryTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (GetParam() == std::string("memory")) {
      store_ = std::make_shared<MemoryStore>();
      return;
    }
    auto server = TcpStoreServer::listen("127.0.0.1", 0, "");
    ASSERT_TRUE(server.ok()) << server.status().text();
    server_ = std::move(*server);
    store_ = connect();
  }
  // Returns the store as another process sees it: over TCP, through its own client.
  std::shared_ptr<Store> connect() {
    if (!server_) return store_;
    auto store = connect_tcp_store("127.0.0.1", server_->port(), "", long_enough);
    EXPECT_TRUE(store.ok()) << store.status().text();
    return *store;
  }
  std::unique_ptr<Directory> directory(const Key& key = {}) {
    return std::make_unique<Directory>(connect(), "job", key);
  }

  std::unique_ptr<TcpStoreServer> server_;
  std::shared_ptr<Store> store_;
};

INSTANTIATE_TEST_SUITE_P(Stores, DirectoryTest, ::testing::Values("memory", "tcp"),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(DirectoryTest, FindsByNameAndByRank) {
  const auto a = directory(), b = directory();
  const auto record = record_of("server", 0);
  ASSERT_TRUE(a->join(record, unasked).ok());
  EXPECT_EQ(*b->find("server", milliseconds(0)), record);
  EXPECT_EQ(*b->find(0, milliseconds(0)), record);
  const auto nobody = b->find("nobody", milliseconds(0)).status();
  EXPECT_EQ(nobody.code(), Code::not_found);
  EXPECT_THAT(what(nobody), HasSubstr("\"nobody\""));
  EXPECT_EQ(b->find(1, milliseconds(10)).status().code(), Code::not_found);
}

TEST_P(DirectoryTest, FindWaitsForAnAgentThatJoinsLater) {
  const auto a = directory(), b = directory();
  std::thread finder([&] {
    const auto found = b->find("late", seconds(30));
    EXPECT_TRUE(found.ok()) << found.status().text();
  });
  std::this_thread::sleep_for(milliseconds(30));
  const auto from = steady_clock::now();
  ASSERT_TRUE(a->join(record_of("late"), unasked).ok());
  finder.join();
  EXPECT_LT(steady_clock::now() - from, seconds(10));
}

TEST_P(DirectoryTest, NameOfALivingAgentIsRefusedWithItsPidAndHost) {
  const auto a = directory(), b = directory();
  const auto first = record_of("server", 0);
  ASSERT_TRUE(a->join(first, unasked).ok());
  const auto status = b->join(record_of("server"), always_alive);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_THAT(what(status),
              AllOf(HasSubstr("\"server\""), HasSubstr("pid " + std::to_string(first.pid)), HasSubstr(first.host)));
  EXPECT_EQ(*directory()->find("server", milliseconds(0)), first);
}

TEST_P(DirectoryTest, HolderOfASlotLearnsOnceWhoWasRefusedIt) {
  const auto a = directory(), b = directory();
  const auto first = record_of("one", 0), second = record_of("two", 0);
  ASSERT_TRUE(a->join(first, unasked).ok());
  EXPECT_EQ(a->take_refused(first.incarnation), std::nullopt);
  int asked = 0;
  std::optional<Record> refused;
  const auto dial = [&](const Record& holder) {
    if (++asked == 2) refused = a->take_refused(holder.incarnation);  // as an agent does that has been dialled
    return true;
  };
  EXPECT_EQ(b->join(second, dial).code(), Code::invalid_argument);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(refused, second);
  EXPECT_EQ(a->take_refused(first.incarnation), std::nullopt);
}

TEST_P(DirectoryTest, RankOfALivingAgentIsRefusedAndTheNameIsFreed) {
  const auto a = directory(), b = directory(), c = directory();
  ASSERT_TRUE(a->join(record_of("one", 0), unasked).ok());
  const auto status = b->join(record_of("two", 0), always_alive);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_THAT(what(status), AllOf(HasSubstr("rank 0"), HasSubstr("\"one\"")));
  EXPECT_EQ(c->find("two", milliseconds(0)).status().code(), Code::not_found);
  EXPECT_TRUE(c->join(record_of("two", 1), unasked).ok());
}

TEST_P(DirectoryTest, DeadPredecessorIsReplacedAfterOneLivenessCheck) {
  const auto first = record_of("server", 0), second = record_of("server", 0);
  ASSERT_TRUE(directory()->join(first, unasked).ok());
  int questions = 0;
  ASSERT_TRUE(directory()
                  ->join(second,
                         [&](const Record& other) {
                           ++questions;
                           EXPECT_EQ(other, first);
                           return false;
                         })
                  .ok());
  EXPECT_EQ(questions, 1);
  const auto reader = directory();
  EXPECT_EQ(reader->find("server", milliseconds(0))->incarnation, second.incarnation);
  EXPECT_EQ(reader->find(0, milliseconds(0))->incarnation, second.incarnation);
}

TEST_P(DirectoryTest, AnAgentThatLeavesFreesItsNameAndRankAtOnce) {
  const auto a = directory(), reader = directory();
  ASSERT_TRUE(a->join(record_of("server", 0), unasked).ok());
  a->leave();
  a->leave();
  const auto gone = reader->find("server", milliseconds(0)).status();
  EXPECT_EQ(gone.code(), Code::not_found);
  EXPECT_THAT(what(gone), HasSubstr("has left"));
  for (int i = 0; i < 20; ++i) {
    const auto next = directory();
    const auto record = record_of("server", 0);
    ASSERT_TRUE(next->join(record, unasked).ok());
    EXPECT_EQ(reader->find(0, milliseconds(0))->incarnation, record.incarnation);
    next->leave();
  }
}

TEST_P(DirectoryTest, OneOfSixteenConcurrentClaimantsGetsTheName) {
  for (int round = 0; round < 5; ++round) {
    const auto name = "contested" + std::to_string(round);
    std::vector<std::unique_ptr<Directory>> directories;
    std::vector<Record> records;
    for (int i = 0; i < 16; ++i) {
      directories.push_back(directory());
      records.push_back(record_of(name, 100 * round));
    }
    std::atomic<int> won = 0, refused = 0;
    std::atomic<std::uint64_t> winner = 0;
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < directories.size(); ++i) {
      threads.emplace_back([&, i] {
        const auto status = directories[i]->join(records[i], always_alive);
        if (status) {
          ++won;
          winner = records[i].incarnation;
        } else if (status.code() == Code::invalid_argument) {
          EXPECT_THAT(what(status), HasSubstr(name));
          ++refused;
        } else {
          ADD_FAILURE() << status.text();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    ASSERT_EQ(won, 1);
    ASSERT_EQ(refused, 15);
    EXPECT_EQ(directory()->find(name, milliseconds(0))->incarnation, winner);
  }
}

TEST_P(DirectoryTest, OneOfSixteenConcurrentClaimantsReplacesADeadAgent) {
  const auto dead = record_of("server", 0);
  ASSERT_TRUE(directory()->join(dead, unasked).ok());
  std::atomic<int> won = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      const auto mine = directory();
      const auto alive = [&](const Record& other) { return other.incarnation != dead.incarnation; };
      won += mine->join(record_of("server", 0), alive).ok() ? 1 : 0;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(won, 1);
}

TEST_P(DirectoryTest, ClaimantThatDiesHalfwayIsPassedOver) {
  // The claimant has counted itself in the name's slot, and then died.
  ASSERT_TRUE(store_->add("job/gen/n/server", 1).ok());
  const auto a = directory(), reader = directory();
  const auto record = record_of("server");
  ASSERT_TRUE(a->join(record, unasked).ok());
  EXPECT_EQ(reader->find("server", milliseconds(0))->incarnation, record.incarnation);
}

TEST_P(DirectoryTest, ClaimantThatIsSlowHalfwayKeepsTheName) {
  ASSERT_TRUE(store_->add("job/gen/n/server", 1).ok());
  const auto a = directory();
  const auto slow = record_of("server"), fast = record_of("server");
  // The slow claimant sets its record while the other claimant waits for it.
  std::thread comes_back([&] {
    std::this_thread::sleep_for(milliseconds(20));
    ASSERT_TRUE(store_->set("job/rec/n/server/1", encode_record(slow, Key(), "job/rec/n/server/1")).ok());
  });
  const auto status = a->join(fast, always_alive);
  comes_back.join();
  EXPECT_EQ(status.code(), Code::invalid_argument) << status.text();
  EXPECT_EQ(directory()->find("server", milliseconds(0))->incarnation, slow.incarnation);
}

// The store of a process that is stopped after it has counted itself in a slot, and before it sets its record there. It
// stays stopped until `go_on`.
class StoppedInTheMiddle final : public Store {
 public:
  explicit StoppedInTheMiddle(std::shared_ptr<Store> store) : store_(std::move(store)) {}
  Status set(std::string_view key, ByteView value) override {
    if (std::exchange(running_, false)) {
      stopped.set_value();
      go_on.get_future().wait();
    }
    return store_->set(key, value);
  }
  Result<Bytes> get(std::string_view key, milliseconds timeout) override { return store_->get(key, timeout); }
  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override { return store_->add(key, amount); }
  [[nodiscard]] bool loopback() const override { return true; }

  std::promise<void> stopped, go_on;

 private:
  std::shared_ptr<Store> store_;
  bool running_ = true;
};

TEST(Directory, ClaimantThatWasPassedOverYields) {
  const auto store = std::make_shared<MemoryStore>();
  const auto slow_store = std::make_shared<StoppedInTheMiddle>(store);
  Status slow_status;
  std::thread slow([&] { slow_status = Directory(slow_store, "job", {}).join(record_of("server"), always_alive); });
  slow_store->stopped.get_future().wait();
  const auto fast = record_of("server");
  EXPECT_TRUE(Directory(store, "job", {}).join(fast, unasked).ok());
  slow_store->go_on.set_value();
  slow.join();
  EXPECT_EQ(slow_status.code(), Code::invalid_argument) << slow_status.text();
  EXPECT_EQ(Directory(store, "job", {}).find("server", milliseconds(0))->incarnation, fast.incarnation);
}

TEST_P(DirectoryTest, CounterWithAForeignValueEndsTheJoin) {
  ASSERT_TRUE(store_->add("job/gen/n/a", std::int64_t{1} << 40).ok());
  const auto status = directory()->join(record_of("a"), unasked);
  EXPECT_EQ(status.code(), Code::protocol_error);
  EXPECT_THAT(what(status), HasSubstr("another program writes to this key"));
}

TEST_P(DirectoryTest, RecordsSignedByAnotherKeyAreNeitherFoundNorReplaced) {
  const auto key = Key::random();
  ASSERT_TRUE(directory(Key::random())->join(record_of("server", 0), unasked).ok());
  const auto mine = directory(key);
  for (const auto& status : {mine->find("server", milliseconds(0)).status(), mine->find(0, seconds(5)).status(),
                             mine->join(record_of("server"), unasked)}) {
    EXPECT_EQ(status.code(), Code::unauthenticated) << status.text();
    EXPECT_THAT(what(status), HasSubstr("TENSORFERRY_KEY_FILE"));
  }
  ASSERT_TRUE(directory(key)->join(record_of("other", 1), unasked).ok());
  EXPECT_TRUE(mine->find("other", milliseconds(0)).ok());
}

// ---- Worlds and barriers

TEST_P(DirectoryTest, WorldIsCompleteWhenAllRanksHaveJoined) {
  constexpr int world_size = 8;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto mine = directory();
      ASSERT_TRUE(mine->join(record_of("agent" + std::to_string(rank), rank), unasked).ok());
      const auto world = mine->wait_for_world(world_size, seconds(30));
      ASSERT_TRUE(world.ok()) << world.status().text();
      for (int other = 0; other < world_size; ++other) {
        EXPECT_EQ((*world)[static_cast<std::size_t>(other)].name, "agent" + std::to_string(other));
      }
      for (int i = 0; i < 3; ++i) {
        const auto status = mine->barrier("shutdown", seconds(30));
        EXPECT_TRUE(status.ok()) << status.text();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_P(DirectoryTest, MissingRanksAreNamed) {
  const auto a = directory(), b = directory();
  ASSERT_TRUE(a->join(record_of("zero", 0), unasked).ok());
  ASSERT_TRUE(b->join(record_of("two", 2), unasked).ok());
  const auto status = a->wait_for_world(5, milliseconds(100)).status();
  EXPECT_EQ(status.code(), Code::deadline_exceeded);
  EXPECT_THAT(what(status), AllOf(HasSubstr("2 of 5"), HasSubstr("ranks 1, 3, 4")));
  EXPECT_EQ(a->wait_for_world(0, milliseconds(0)).status().code(), Code::invalid_argument);
  EXPECT_EQ(a->barrier("x", milliseconds(0)).code(), Code::invalid_argument);
}

TEST_P(DirectoryTest, WorldCountsAMemberThatHasLeftButNoMemberOfAnEarlierWorld) {
  const auto a0 = directory(), a1 = directory();
  ASSERT_TRUE(a0->join(record_of("zero", 0), unasked).ok());
  ASSERT_TRUE(a1->join(record_of("one", 1), unasked).ok());
  ASSERT_TRUE(a1->wait_for_world(2, long_enough).ok());
  a1->leave();  // before a0 waits for the world
  EXPECT_TRUE(a0->wait_for_world(2, long_enough).ok());
  a0->leave();

  const auto b0 = directory();
  ASSERT_TRUE(b0->join(record_of("zero", 0), unasked).ok());
  const auto status = b0->wait_for_world(2, milliseconds(100)).status();
  EXPECT_EQ(status.code(), Code::deadline_exceeded);
  EXPECT_THAT(what(status), HasSubstr("rank 1"));
}

TEST_P(DirectoryTest, BarrierNamesMissingAndDepartedMembers) {
  const auto a = directory(), b = directory(), c = directory();
  ASSERT_TRUE(a->join(record_of("zero", 0), unasked).ok());
  ASSERT_TRUE(b->join(record_of("one", 1), unasked).ok());
  ASSERT_TRUE(c->join(record_of("two", 2), unasked).ok());
  for (auto* one : {a.get(), b.get(), c.get()}) ASSERT_TRUE(one->wait_for_world(3, long_enough).ok());
  Status leader;
  std::thread first([&] { leader = a->barrier("end", seconds(2)); });
  const auto follower = b->barrier("end", seconds(30));
  first.join();
  for (const auto& status : {leader, follower}) {
    EXPECT_EQ(status.code(), Code::deadline_exceeded);
    EXPECT_THAT(what(status), AllOf(HasSubstr("1 of 3"), HasSubstr("\"two\""), Not(HasSubstr("\"one\""))));
  }
  // The barrier fails long before its time-out, because a member that left in order will not arrive.
  c->leave();
  const auto from = steady_clock::now();
  std::thread other([&] { EXPECT_THAT(what(b->barrier("end", seconds(60))), HasSubstr("has left")); });
  EXPECT_THAT(what(a->barrier("end", seconds(60))), AllOf(HasSubstr("\"two\""), HasSubstr("has left")));
  other.join();
  EXPECT_LT(steady_clock::now() - from, seconds(20));
  a->leave();
  EXPECT_THAT(what(b->barrier("end", seconds(60))), HasSubstr("rank 0 has left"));
}

TEST(Directory, ALostStoreIsAnErrorExceptForLeaving) {
  auto server = TcpStoreServer::listen("127.0.0.1", 0, "");
  ASSERT_TRUE(server.ok());
  const auto store = connect_tcp_store("127.0.0.1", (*server)->port(), "", long_enough);
  ASSERT_TRUE(store.ok());
  Directory directory(*store, "job", {});
  ASSERT_TRUE(directory.join(record_of("zero", 0), unasked).ok());
  server->reset();
  EXPECT_EQ(directory.find("other", seconds(30)).status().code(), Code::connection_lost);
  EXPECT_EQ(directory.wait_for_world(2, seconds(30)).status().code(), Code::connection_lost);
  const auto from = steady_clock::now();
  directory.leave();
  EXPECT_LT(steady_clock::now() - from, seconds(5));
}

TEST(Directory, WarnsOfAMemberThatOtherHostsCannotReach) {
  const auto said_by = [](int rank, const std::vector<std::string>& here, const std::string& boot_id) {
    const auto store = std::make_shared<MemoryStore>();
    auto local = record_of("w0", 0), remote = record_of("w1", 1);
    local.tcp_addresses = here;
    remote.tcp_addresses = {"192.0.2.7:7000"};
    remote.host = "other";
    if (!boot_id.empty()) remote.boot_id = boot_id;
    Directory first(store, "p", {}), second(store, "p", {});
    EXPECT_TRUE(first.join(local, unasked).ok());
    EXPECT_TRUE(second.join(remote, unasked).ok());
    ::testing::internal::CaptureStderr();
    EXPECT_TRUE((rank == 0 ? first : second).wait_for_world(2, long_enough).ok());
    return ::testing::internal::GetCapturedStderr();
  };
  for (const int rank : {0, 1}) {
    const auto warning = said_by(rank, {"127.0.0.1:7000", "[::1]:7000"}, "another kernel");
    EXPECT_THAT(warning, HasSubstr("\"w0\" (rank 0, pid "));
    EXPECT_THAT(warning, HasSubstr("listens at loopback addresses alone, where \"w1\" (rank 1, pid "));
    EXPECT_EQ(std::count(warning.begin(), warning.end(), '\n'), 1);
    EXPECT_EQ(said_by(rank, {"127.0.0.1:7000", "192.0.2.6:7000"}, "another kernel"), "");
    EXPECT_EQ(said_by(rank, {"127.0.0.1:7000"}, ""), "");
  }
}

}  // namespace
}  // namespace tensorferry
