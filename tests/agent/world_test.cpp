// Worlds in the directory: what an agent that died or left does to the agents that begin together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "agent/rendezvous/directory.h"
#include "agent/rendezvous/memory_store.h"
#include "agent/rendezvous/roster.h"
#include "tests/agent/counting_store.h"

namespace tensorferry {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

const Directory::Alive dead = [](const Record&) { return false; };

class World : public ::testing::Test {
 protected:
  std::unique_ptr<Directory> join(int rank, const Key& key = {}) {
    auto record = describe_this_process();
    record.name = "w" + std::to_string(rank);
    record.rank = rank;
    auto directory = std::make_unique<Directory>(store_, "job", key);
    const auto joined = directory->join(record, dead);
    EXPECT_TRUE(joined.ok()) << joined.text();
    return directory;
  }
  static void expect_begins(Directory& directory, int size) {
    const auto world = directory.wait_for_world(size, seconds(30));
    ASSERT_TRUE(world.ok()) << world.status().text();
    for (int rank = 0; rank < size; ++rank) EXPECT_EQ((*world)[static_cast<std::size_t>(rank)].rank, rank);
  }

  std::shared_ptr<MemoryStore> memory_ = std::make_shared<MemoryStore>();
  std::shared_ptr<testing::CountingStore> store_ = std::make_shared<testing::CountingStore>(memory_);
};

TEST_F(World, BeginsAlsoIfTheLastAgentDiedBeforeItToldTheOthers) {
  const auto zero = join(0), one = join(1), last = join(2);  // `last` never waits for the world
  std::thread other([&] { expect_begins(*one, 3); });
  expect_begins(*zero, 3);
  other.join();
}

TEST_F(World, ThatDoesNotBeginNamesThoseThatNeverCame) {
  std::string told;
  for (const int rank : {0, 1, 2}) {  // each gives up, and leaves, before the next one does
    auto member = join(rank);
    told = member->wait_for_world(4, milliseconds(50)).status().what();
    member->leave();
  }
  EXPECT_THAT(told, HasSubstr("1 of 4 agents have joined; missing: rank 3; ranks 0, 1 came, and gave up before"));
}

TEST_F(World, BeginsAlsoIfTheCountOfAgentsIsTooLow) {
  const auto zero = join(0), one = join(1);
  ASSERT_TRUE(memory_->add("job/arrived", -1).ok());
  std::thread other([&] { expect_begins(*one, 3); });
  std::thread third([&] { expect_begins(*join(2), 3); });
  expect_begins(*zero, 3);
  other.join();
  third.join();
}

TEST_F(World, BeginsAlsoIfTheCountOfAgentsIsTooHigh) {
  ASSERT_TRUE(memory_->add("job/arrived", 2).ok());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      std::this_thread::sleep_for(milliseconds(100 * rank));
      expect_begins(*join(rank), 3);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_F(World, TakesAnAgentThatWasStartedAnew) {
  const auto zero = join(0), one = join(1);
  expect_begins(*zero, 2);
  expect_begins(*one, 2);
  const auto again = join(1);
  const auto world = again->wait_for_world(2, seconds(30));
  ASSERT_TRUE(world.ok()) << world.status().text();
  EXPECT_EQ((*world)[1].incarnation, zero->find(1, {})->incarnation);
}

/// Three agents are killed after `rounds_before` of them have seen their world begin, and are started again at the
/// store that lives on. The new ones begin a world of their own, in whichever order they come.
class WorldStartedAgain : public World, public ::testing::WithParamInterface<int> {};

TEST_P(WorldStartedAgain, BeginsWithoutTheDead) {
  std::vector<std::unique_ptr<Directory>> killed;
  std::set<std::uint64_t> dead_ones;
  const int ranks = GetParam();
  for (int rank = 0; rank < ranks; ++rank) killed.push_back(join(rank));
  if (ranks == 3) {
    for (const auto& each : killed) expect_begins(*each, 3);
  }
  for (int rank = 0; rank < ranks; ++rank) dead_ones.insert(killed.front()->find(rank, {})->incarnation);
  const Directory::Ended ended = [&](const Record& record, bool earlier) {
    EXPECT_EQ(earlier, ranks == 3 && dead_ones.contains(record.incarnation));
    return dead_ones.contains(record.incarnation);
  };

  std::vector<std::unique_ptr<Directory>> again;
  std::vector<std::thread> threads;
  for (const int rank : {1, 0, 2}) {
    again.push_back(join(rank));
    threads.emplace_back([&, one = again.back().get()] {
      const auto world = one->wait_for_world(3, seconds(30), {}, ended);
      ASSERT_TRUE(world.ok()) << world.status().text();
      for (const auto& member : *world) EXPECT_FALSE(dead_ones.contains(member.incarnation)) << member.rank;
    });
  }
  for (auto& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(KilledOnes, WorldStartedAgain, ::testing::Values(1, 2, 3));

TEST_F(World, NamesTheAgentsThatHaveEndedAmongTheMissing) {
  const auto zero = join(0), one = join(1);
  const auto dead_one = zero->find(1, {})->incarnation;
  const auto status = zero->wait_for_world(2, milliseconds(0), {},
                                           [&](const Record& record, bool) { return record.incarnation == dead_one; })
                          .status();
  EXPECT_EQ(status.code(), Code::deadline_exceeded);
  EXPECT_THAT(status.text(),
              HasSubstr("1 of 2 agents have joined; missing: rank 1 (the agent there has ended: \"w1\""));
}

TEST_F(World, AgentThatLeftIsToldFromOneThatNeverWas) {
  const auto zero = join(0), one = join(1);
  expect_begins(*zero, 2);
  expect_begins(*one, 2);
  one->leave();
  const auto text = [&](const Result<Record>& found) { return found.status().text(); };
  const auto left = "has left (it was pid " + std::to_string(::getpid());
  EXPECT_THAT(text(zero->find("w1", {})), AllOf(HasSubstr("agent \"w1\" "), HasSubstr(left)));
  EXPECT_THAT(text(zero->find(1, {})), AllOf(HasSubstr("agent of rank 1 "), HasSubstr(left)));
  EXPECT_THAT(text(zero->find("w2", {})), HasSubstr("no agent \"w2\" has joined"));
}

TEST_F(World, LeavesNothingBehind) {
  for (int round = 0; round < 3; ++round) {
    const auto zero = join(0), one = join(1), two = join(2);
    for (auto* each : {zero.get(), one.get(), two.get()}) expect_begins(*each, 3);
    std::vector<std::thread> threads;
    for (auto* each : {zero.get(), one.get(), two.get()}) {
      threads.emplace_back([each] { EXPECT_TRUE(each->barrier("end", seconds(30)).ok()); });
    }
    for (auto& thread : threads) thread.join();
    for (auto* each : {two.get(), zero.get(), one.get()}) each->leave();
    EXPECT_EQ(memory_->size(), 0U);
  }
}

TEST_F(World, AgentThatWasReplacedDeletesNothingOfItsSuccessor) {
  const auto zero = join(0), one = join(1);
  expect_begins(*zero, 2);
  expect_begins(*one, 2);
  const auto successor = join(1);
  one->leave();
  expect_begins(*successor, 2);
  EXPECT_TRUE(zero->find("w1", {}).ok());
}

TEST_F(World, SuccessorDeletesTheRecordsBeforeItsOwn) {
  join(0)->leave();
  const auto keys = memory_->size();
  for (int i = 0; i < 20; ++i) join(0)->leave();
  EXPECT_EQ(memory_->size(), keys);
  std::vector<std::unique_ptr<Directory>> dead_ones;
  for (int i = 0; i < 20; ++i) dead_ones.push_back(join(0));
  EXPECT_EQ(memory_->size(), keys + 1);  // and the count of agents that are there
}

TEST_F(World, RosterOfAnotherKeyIsRefused) {
  const auto key = Key::random();
  const auto one = join(1, key);
  const auto roster = roster_of({*one->find(1, {})});
  ASSERT_TRUE(memory_->set("job/roster/1", encode_roster(roster, Key::random(), "job/roster/1")).ok());
  EXPECT_EQ(one->wait_for_world(2, seconds(5)).status().code(), Code::unauthenticated);
  ASSERT_TRUE(memory_->set("job/roster/1", view_of("garbage")).ok());
  EXPECT_EQ(one->wait_for_world(2, seconds(5)).status().code(), Code::protocol_error);
}

TEST_F(World, StartsWithAFixedNumberOfStoreOperationsForEachAgent) {
  for (const int size : {4, 16, 64, 256}) {
    store_ = std::make_shared<testing::CountingStore>(memory_ = std::make_shared<MemoryStore>());
    std::vector<std::unique_ptr<Directory>> agents;
    for (int rank = 0; rank < size; ++rank) agents.push_back(join(rank));
    for (const auto& each : agents) expect_begins(*each, size);
    EXPECT_LE(store_->operations, 20 * size);
    for (const auto& each : agents) each->leave();
    EXPECT_LE(store_->operations, 40 * size);
  }
}

}  // namespace
}  // namespace tensorferry
