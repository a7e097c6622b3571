#include <gmock/gmock.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <stdexcept>

#include "channels/region.h"
#include "tests/agent/patience.h"
#include "tests/rpc/collectives/world.h"

namespace tensorferry::testing {
namespace {

using collectives::RawGroup;
using collectives::StartOptions;
using Floats = std::vector<float>;
using ::testing::HasSubstr;

/// A group, an operation, and how many bytes it has: in the slots, and beyond them.
struct Ending {
  GroupShape shape;
  std::string algorithm;  // of all_reduce
  std::size_t count = 100;
};
std::string name_of_ending(const ::testing::TestParamInfo<Ending>& each) {
  return name_of(each.param.shape) + "_" + each.param.algorithm + "_" + std::to_string(each.param.count);
}

class Endings : public ::testing::TestWithParam<Ending> {
 protected:
  void SetUp() override {
    world = std::make_unique<GroupWorld>(GetParam().shape.ranks);
    settings = GroupWorld::settings_of(GetParam().shape);
    settings.algorithms = "all_reduce=" + GetParam().algorithm + ",reduce=" + GetParam().algorithm;
    world->form(settings, {}, GetParam().shape.hosts);
  }
  /// The last rank leaves at once; the agent's peers see it as dead.
  void last_rank_leaves() {
    world->services.back()->leave();
    world->agents.back()->leave();
  }
  /// All other ranks must fail, with an error that names the last one.
  void run_and_expect_the_last_to_be_named(const std::function<Status(RawGroup&)>& operation) {
    world->run([&](std::size_t rank, RawGroup& group) {
      const auto status = operation(group);
      ASSERT_FALSE(status.ok()) << "rank " << rank;
      if (rank + 1 == ranks) return;
      EXPECT_THAT(status.text(), HasSubstr("rank " + std::to_string(ranks - 1))) << "rank " << rank;
      EXPECT_TRUE(status.code() == Code::connection_lost || status.code() == Code::cancelled) << status.text();
    });
  }

  void leave_within_a_reduction(int step);

  std::unique_ptr<GroupWorld> world;
  collectives::GroupSettings settings;
  const std::size_t ranks = GetParam().shape.ranks;
};

TEST_P(Endings, ARankThatNeverComesIsNamedWhenItLeaves) {
  std::vector<Floats> values(ranks, Floats(GetParam().count, 1));
  std::thread leaver([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    last_rank_leaves();
  });
  run_and_expect_the_last_to_be_named([&](RawGroup& group) {
    auto& mine = values[group.rank()];
    if (group.rank() + 1 == ranks) {
      while (group.failed().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return group.failed();
    }
    return ended(group.all_reduce(bytes_in(mine), bytes_in(mine), DType::float32, Reduction::sum));
  });
  leaver.join();
}

TEST_P(Endings, ARankThatLeavesWithinAReductionIsNamed) {
  if (GetParam().algorithm == "one_shot") GTEST_SKIP() << "the others need nothing more from it";
  if (GetParam().algorithm == "two_level" && GetParam().count == 100) GTEST_SKIP() << "only a leader reduces";
  for (int step = 0; step < (GetParam().algorithm == "ring" ? static_cast<int>(ranks) - 1 : 1); ++step) {
    SCOPED_TRACE(step);
    if (step != 0) SetUp();  // a world of its own
    leave_within_a_reduction(step);
  }
}
void Endings::leave_within_a_reduction(int step) {
  std::vector<Floats> values(ranks, Floats(GetParam().count, 1));
  std::atomic<int> combined = 0;
  run_and_expect_the_last_to_be_named([&](RawGroup& group) {
    ReduceOp op(Reduction::custom);
    op.any_order = true;
    op.combine = [&](void* sum, const void* other, std::size_t count, DType) {
      for (std::size_t i = 0; i < count; ++i) static_cast<float*>(sum)[i] += static_cast<const float*>(other)[i];
      // Between the two steps of the operation, or at the given step of a ring.
      if (group.rank() + 1 == ranks && combined++ == step) {
        std::thread([&] { last_rank_leaves(); }).join();
      }
    };
    auto& mine = values[group.rank()];
    return ended(group.all_reduce(bytes_in(mine), bytes_in(mine), DType::float32, op));
  });
}

TEST_P(Endings, AMismatchIsNamedAtEveryRankAndTheGroupGoesOn) {
  for (std::size_t odd = 0; odd < ranks; ++odd) {
    world->run([&](std::size_t rank, RawGroup& group) {
      Floats values(GetParam().count + (rank == odd ? 1 : 0), 1);
      const auto sum = ended(group.all_reduce(bytes_in(values), bytes_in(values), DType::float32, Reduction::sum));
      EXPECT_EQ(sum.code(), Code::invalid_argument);
      if (ranks > 2) {
        EXPECT_THAT(sum.text(), HasSubstr("rank " + std::to_string(odd) + " ("));
      }
      const auto other =
          rank == odd ? ended(group.broadcast(bytes_in(values), DType::float32, 0))
                      : ended(group.reduce(bytes_in(values), bytes_in(values), DType::float32, Reduction::max, 0));
      EXPECT_EQ(other.code(), Code::invalid_argument) << other.text();
      if (ranks > 2) {
        EXPECT_THAT(other.text(), HasSubstr("rank " + std::to_string(odd) + " ("));
      }
      Floats right(GetParam().count, 1);
      EXPECT_TRUE(ended(group.all_reduce(bytes_in(right), bytes_in(right), DType::float32, Reduction::sum)).ok());
      EXPECT_EQ(right, Floats(GetParam().count, static_cast<float>(ranks)));
    });
  }
}

TEST_P(Endings, ATimeOutNamesTheMissingRankAndFailsTheGroupForAll) {
  world->run([&](std::size_t rank, RawGroup& group) {
    Floats values(GetParam().count, 1);
    if (rank + 1 == ranks) {
      while (group.failed().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const auto status = ended(group.all_reduce(bytes_in(values), bytes_in(values), DType::float32, Reduction::sum,
                                               {std::chrono::milliseconds(200), true, nullptr, {}}));
    EXPECT_EQ(status.code(), Code::deadline_exceeded) << status.text();
    EXPECT_THAT(status.text(), HasSubstr("rank " + std::to_string(ranks - 1) + " ("));
  });
  // The same agents form another group.
  settings.label = "again";
  world->form(settings, {}, GetParam().shape.hosts);
  world->run([](std::size_t, RawGroup& group) { EXPECT_TRUE(ended(group.barrier()).ok()); });
}

TEST_P(Endings, SurvivorsOfADeathFormAnotherGroup) {
  last_rank_leaves();
  run_and_expect_the_last_to_be_named([](RawGroup& group) { return ended(group.barrier()); });
  if (ranks < 3) return;
  settings.label = "survivors";
  std::vector<std::size_t> survivors;
  for (std::size_t rank = 0; rank + 1 < ranks; ++rank) survivors.push_back(rank);
  world->form(settings, survivors, GetParam().shape.hosts);
  world->run([&](std::size_t, RawGroup& group) {
    Floats values(GetParam().count, 1);
    EXPECT_TRUE(ended(group.all_reduce(bytes_in(values), bytes_in(values), DType::float32, Reduction::sum)).ok());
    EXPECT_EQ(values[0], static_cast<float>(ranks - 1));
  });
}

/// In soak all combinations. Otherwise few, in which each value meets each value of each other property.
std::vector<Ending> all_endings() {
  constexpr std::array links{"memory", "mail", "messages"}, algorithms{"one_shot", "two_shot", "ring"};
  std::vector<Ending> out;
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = 0; j < 3; ++j) {
      for (std::size_t k = 0; k < 3; ++k) {
        if (!is_soak && (i + j + 1) % 3 != k) continue;
        const bool is_large = (i + 2) % 3 == j;
        if (is_soak || !is_large) out.push_back({{i + 2, links[j]}, algorithms[k], 100});
        if (is_soak || is_large) out.push_back({{i + 2, links[j]}, algorithms[k], 100000});
      }
    }
  }
  for (std::size_t i = 0; i < 2; ++i) {
    for (std::size_t j = 0; j < 2; ++j) {
      if (is_soak || i != j) out.push_back({{i + 3, links[j], false, 2}, "two_level", 100});
      if (is_soak || i == j) out.push_back({{i + 3, links[j], false, 2}, "two_level", 100000});
    }
  }
  return out;
}
INSTANTIATE_TEST_SUITE_P(, Endings, ::testing::ValuesIn(all_endings()), name_of_ending);

TEST(Groups, SeveralOverTheSameAgentsDoNotMix) {
  GroupWorld world(3);
  auto settings = GroupWorld::settings_of({3, "memory"});
  world.form(settings);
  auto first = world.groups;
  settings.label = "second";
  world.form(settings);
  world.run([&](std::size_t rank, RawGroup& second) {
    for (int round = 0; round < 50; ++round) {
      std::vector<std::int64_t> a(10, 1), b(10000, 2);
      const auto one = first[rank]->all_reduce(bytes_in(a), bytes_in(a), DType::int64, Reduction::sum);
      const auto two = second.all_reduce(bytes_in(b), bytes_in(b), DType::int64, Reduction::sum);
      EXPECT_TRUE(ended(two).ok());
      EXPECT_TRUE(ended(one).ok());
      EXPECT_EQ(a[9], 3);
      EXPECT_EQ(b[9999], 6);
    }
  });
}

TEST(Groups, OperationsInTheBackgroundLeavePlacesToTheMessagesForWhichTheyWait) {
  GroupWorld world(2, [](RawAgentOptions& options) { options.max_threads = 2; });
  auto settings = GroupWorld::settings_of({2, "messages"});
  settings.timeout = std::chrono::seconds(20);
  world.form(settings);
  auto first = world.groups;
  settings.label = "second";
  world.form(settings);
  world.run([&](std::size_t rank, RawGroup& second) {
    // Both operations of rank 0 run before it gets a message.
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const auto one = first[rank]->barrier(), two = second.barrier();
    for (const auto& work : {one, two}) {
      while (!work->done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_TRUE(work->status().ok()) << work->status().text();
    }
  });
}

TEST(Groups, AMemberThatJoinsAndGoesNoFurtherIsNamed) {
  GroupWorld world(2);
  auto settings = GroupWorld::settings_of({2, "memory"});
  settings.timeout = std::chrono::seconds(3);
  collectives::JoinGroup join{settings.label, world.names, 1, {}};
  join.member.name = "rank1";
  Message message;
  message.payload = encode(collectives::GroupMessage(join));
  auto joined = world.agents[1]->call("rank0", collectives::group_function, std::move(message), within(long_enough));
  const auto formed = world.services[0]->form(world.names, settings);
  EXPECT_EQ(formed.status().code(), Code::deadline_exceeded);
  EXPECT_THAT(formed.status().text(), HasSubstr("\"rank1\" joined, but was not ready"));
  joined.wait();
}

TEST(Groups, JoinsOfGroupsThatNeverFormAreBoundedForEachAgentAndEndWithIt) {
  GroupWorld world(3);
  constexpr std::size_t most = 256, more = 44;
  std::vector<Call> calls;
  for (std::size_t i = 0; i < most + more; ++i) {
    collectives::JoinGroup join{"group " + std::to_string(i), {"rank0", "rank1", "never"}, 1, {}};
    join.member.name = "rank1";
    Message message;
    message.payload = encode(collectives::GroupMessage(join));
    calls.push_back(world.agents[1]->call("rank0", collectives::group_function, std::move(message),
                                          within(std::chrono::seconds(60))));
  }
  const auto ended = [](const Call& call) { return call.done(); };
  EXPECT_TRUE(eventually([&] { return std::count_if(calls.begin(), calls.end(), ended) == more; }));
  for (auto& call : calls) {
    if (call.done()) {
      EXPECT_EQ(call.take().status().code(), Code::resource_exhausted);
    }
  }
  world.form(GroupWorld::settings_of({2, "memory"}), {0, 2});  // another agent has a bound of its own
  // Those that have been answered count until their handlers have returned.
  ASSERT_TRUE(eventually([&] { return world.agents[0]->in_flight().second == most; }));
  world.agents[1]->leave();
  EXPECT_TRUE(eventually([&] { return world.agents[0]->in_flight().second == 0; })) << "no further join is needed";
  world.form(GroupWorld::settings_of({2, "memory"}), {0, 2});
}

TEST(Groups, MessagesThatNoReceiverTakesAreBoundedForEachRank) {
  using collectives::Mailbox;
  GroupWorld world(3);
  world.form(GroupWorld::settings_of({3, "memory"}));
  auto& mailbox = world.groups[0]->mailbox();
  const auto memory = std::make_shared<Bytes>(Mailbox::most_eager);  // all messages lie in the same bytes
  const Buffer data{{}, memory->data(), memory->size(), nullptr, memory};
  collectives::Posted posted;
  posted.from = 1;
  posted.by_tag = true;
  posted.bytes = data.bytes;
  const auto deliver = [&] { return mailbox.deliver(posted, data).code(); };
  for (; posted.sequence < Mailbox::most_unreceived / Mailbox::most_eager; ++posted.sequence)
    ASSERT_EQ(deliver(), Code::ok) << posted.sequence;
  EXPECT_EQ(deliver(), Code::resource_exhausted);
  posted.from = 2;
  EXPECT_EQ(deliver(), Code::ok) << "another rank has a bound of its own";
  Bytes into(data.bytes);
  ASSERT_TRUE(mailbox.receive(1, {true, 0}, into.data(), into.size())->done());
  posted.from = 1;
  EXPECT_EQ(deliver(), Code::ok) << "one message was received";
}

/// Rank 0 leaves when it has done its part in an operation in which rank 1 is slow, and rank 2 waits for rank 1.
class EarlyLeavers : public ::testing::TestWithParam<bool> {};

TEST_P(EarlyLeavers, FailOnlyTheOperationsInWhichTheyTakeNoPart) {
  GroupWorld world(3);
  auto settings = GroupWorld::settings_of({3, "messages"});
  settings.algorithms = "reduce=two_shot";
  world.form(settings);
  std::atomic<bool> left = false;
  world.run([&](std::size_t rank, RawGroup& group) {
    Floats values(3, 1);
    ReduceOp op(Reduction::custom);
    op.combine = [&](void* sum, const void* other, std::size_t count, DType) {
      for (std::size_t i = 0; i < count; ++i) static_cast<float*>(sum)[i] += static_cast<const float*>(other)[i];
      while (rank == 1 && !left) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    ASSERT_TRUE(ended(group.barrier()).ok());
    const auto status = ended(group.reduce(bytes_in(values), bytes_in(values), DType::float32, op, 2));
    EXPECT_TRUE(status.ok()) << rank << ": " << status.text();
    if (rank == 2) {
      EXPECT_EQ(values, Floats(3, 3));
    }
    if (rank == 0) {
      group.close();
      if (GetParam()) {  // its process ends, too
        world.services[0]->leave();
        world.agents[0]->leave();
      }
      // The others hear of it, and look for dead ranks.
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      left = true;
      return;
    }
    const auto next = ended(group.barrier());
    EXPECT_EQ(next.code(), Code::cancelled) << next.text();
    EXPECT_THAT(next.text(), HasSubstr("rank 0 (\"rank0\") has left"));
  });
}
INSTANTIATE_TEST_SUITE_P(, EarlyLeavers, ::testing::Bool(),
                         [](const auto& each) { return each.param ? "withTheirAgent" : "alone"; });

/// A rank reads the memory of one that gives up.
class TornReads : public ::testing::TestWithParam<bool> {};

TEST_P(TornReads, OfARankThatGivesUpFailTheReader) {
#ifdef TENSORFERRY_UNDER_TSAN
  if (GetParam()) GTEST_SKIP() << "one rank writes what another one reads: a data race that the result has to tell";
#endif
  GroupWorld world(2);
  auto settings = GroupWorld::settings_of({2, "memory"});
  settings.algorithms = "reduce=one_shot";
  world.form(settings);
  constexpr std::size_t count = 200'000;  // more than is reduced at once
  static constexpr std::size_t size = count * sizeof(float);
  std::atomic<bool> gave_up = false;
  world.run([&](std::size_t rank, RawGroup& group) {
    auto region = Regions::of_this_process().make(size);
    ASSERT_TRUE(region.ok());
    auto* const mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    std::shared_ptr<void> pages(mapped, [](void* memory) { ::munmap(memory, size); });
    const std::span<std::byte> bytes(GetParam() ? region->data : static_cast<std::byte*>(mapped), size);
    std::fill_n(reinterpret_cast<float*>(bytes.data()), count, 1.0F);
    ASSERT_TRUE(ended(group.barrier()).ok());
    ReduceOp op(Reduction::custom);
    op.combine = [&](void* sum, const void* other, std::size_t elements, DType) {
      for (std::size_t i = 0; i < elements; ++i) static_cast<float*>(sum)[i] += static_cast<const float*>(other)[i];
      while (!gave_up) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    StartOptions options;
    if (rank == 0) options.timeout = std::chrono::milliseconds(200);
    const auto status = ended(group.reduce(bytes, bytes, DType::float32, op, 1, options));
    EXPECT_TRUE(status.code() == Code::deadline_exceeded || status.code() == Code::cancelled) << status.text();
    if (rank == 1) return;
    std::fill_n(reinterpret_cast<float*>(bytes.data()), count, 7.0F);  // it is this rank's again
    *region = {};
    pages.reset();                                                // at once
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until rank 1 has unmapped the region
    gave_up = true;
  });
}
INSTANTIATE_TEST_SUITE_P(, TornReads, ::testing::Bool(),
                         [](const auto& each) { return each.param ? "inARegion" : "inItsProcess"; });

TEST(Groups, AMonitoredBarrierNamesAllWhoDidNotCome) {
  GroupWorld world(4);
  world.form(GroupWorld::settings_of({4, "memory"}));
  world.run([](std::size_t rank, RawGroup& group) {
    ASSERT_TRUE(ended(group.barrier()).ok());
    if (rank == 1 || rank == 3) return;
    const auto status = group.monitored_barrier(std::chrono::seconds(3), true);
    EXPECT_EQ(status.code(), Code::deadline_exceeded);
    if (rank == 2) {
      EXPECT_THAT(status.text(), HasSubstr("Rank 2 successfully reached monitoredBarrier"));
      return;
    }
    EXPECT_THAT(status.text(), HasSubstr("Ranks 1, 3 failed to pass monitoredBarrier in 3000 ms"));
    EXPECT_THAT(status.text(), HasSubstr("rank 1 (\"rank1\"), rank 3 (\"rank3\") have not come"));
  });
}

TEST(Groups, AMonitoredBarrierWithoutTimeFailsAtOnce) {
  GroupWorld world(2);
  world.form(GroupWorld::settings_of({2, "memory"}));
  world.run([](std::size_t rank, RawGroup& group) {
    if (rank == 0) {
      const auto status = group.monitored_barrier(std::chrono::milliseconds(0), true);
      EXPECT_EQ(status.code(), Code::deadline_exceeded);
      EXPECT_THAT(status.text(), HasSubstr("Rank 0 timed out in monitoredBarrier"));
    }
    EXPECT_TRUE(ended(group.barrier()).ok());
  });
}

TEST(Groups, AResultThatCannotBeWrittenFailsAtItsRankAlone) {
  GroupWorld world(2);
  world.form(GroupWorld::settings_of({2, "memory"}));
  world.run([](std::size_t rank, RawGroup& group) {
    const auto finish = [] { throw std::runtime_error("no such address"); };
    const auto status = ended(group.barrier({{}, true, nullptr, rank == 0 ? finish : std::function<void()>()}));
    EXPECT_EQ(status.code(), rank == 0 ? Code::invalid_argument : Code::ok);
    EXPECT_THAT(status.text(), HasSubstr(rank == 0 ? "no such address" : ""));
  });
  world.run([](std::size_t, RawGroup& group) { EXPECT_TRUE(ended(group.barrier()).ok()); });
}

TEST(Groups, AReductionThatThrowsFailsTheGroupAndNamesItsRank) {
  for (const bool object : {false, true}) {  // thrown by a thread of the pool: a std::exception, and another object
    GroupWorld world(2);
    world.form(GroupWorld::settings_of({2, "memory"}));
    const std::string why = object ? "an object that is no std::exception" : "no such element";
    const auto text = "rank 1 (\"rank1\") of group \"default\" has thrown in an operation: " + why;
    world.run([&](std::size_t rank, RawGroup& group) {
      ReduceOp op(Reduction::custom);
      op.combine = [&](void*, const void*, std::size_t, DType) {
        if (rank == 1 && object) throw 7;
        if (rank == 1) throw std::runtime_error(why);
      };
      Floats values(4);
      const auto work = group.all_reduce(bytes_in(values), bytes_in(values), DType::float32, op);
      while (!work->wait(std::chrono::steady_clock::now() + std::chrono::seconds(1))) continue;
      if (rank == 1) {
        EXPECT_EQ(work->status().code(), Code::invalid_argument);
        EXPECT_THAT(work->status().text(), HasSubstr(text));
      }
      EXPECT_THAT(ended(group.barrier()).text(), HasSubstr(text)) << "rank " << rank;
    });
  }
}

TEST(Groups, ARankThatGivesItselfMoreThanItTakesIsRefused) {
  for (const auto& shape : {GroupShape{1, "memory"}, GroupShape{2, "memory"}, GroupShape{2, "messages"}}) {
    GroupWorld world(shape.ranks);
    world.form(GroupWorld::settings_of(shape));
    world.run([&](std::size_t, RawGroup& group) {
      Floats input(8, 1);
      std::vector<Floats> outputs(shape.ranks, Floats(4));
      std::vector<RawGroup::OutBytes> out;
      for (auto& each : outputs) out.push_back(bytes_in(each));
      const auto status = ended(group.all_gather(bytes_in(input), out, DType::float32, false));
      EXPECT_EQ(status.code(), Code::invalid_argument) << status.text();
    });
  }
}

TEST(Groups, AReceiveThatIsLateEndsAlone) {
  GroupWorld world(2);
  world.form(GroupWorld::settings_of({2, "memory"}));
  world.run([](std::size_t rank, RawGroup& group) {
    std::vector<float> values(4, static_cast<float>(rank));
    if (rank == 0) {
      const auto late = ended(
          group.receive(bytes_in(values), DType::float32, 1, 0, {std::chrono::milliseconds(50), true, nullptr, {}}));
      EXPECT_EQ(late.code(), Code::deadline_exceeded);
    }
    EXPECT_TRUE(ended(group.barrier()).ok());
    if (rank == 1) {
      EXPECT_TRUE(ended(group.send(bytes_in(values), DType::float32, 0, 0)).ok());
    }
    if (rank == 0) {
      EXPECT_TRUE(ended(group.receive(bytes_in(values), DType::float32, 1, 0)).ok());
    }
    EXPECT_EQ(values[0], 1);
  });
}

TEST(Groups, AReceiveOfASendThatWasLateLearnsWhy) {
  GroupWorld world(2);
  world.form(GroupWorld::settings_of({2, "memory"}));
  world.run([](std::size_t rank, RawGroup& group) {
    std::vector<float> values(100000);
    if (rank == 1) {
      const auto late =
          ended(group.send(bytes_in(values), DType::float32, 0, 7, {std::chrono::milliseconds(50), true, nullptr, {}}));
      EXPECT_EQ(late.code(), Code::deadline_exceeded);
    }
    EXPECT_TRUE(ended(group.barrier()).ok());
    if (rank == 0) {
      const auto status = ended(group.receive(bytes_in(values), DType::float32, 1, 7));
      EXPECT_EQ(status.code(), Code::cancelled);
      EXPECT_THAT(status.text(), HasSubstr("rank 1 (\"rank1\") has withdrawn the data: a send to rank 0"));
    }
  });
}

TEST(Groups, WhatRunsBeforeTheEndHasRunWhenAWaitReturns) {
  GroupWorld world(2);
  world.form(GroupWorld::settings_of({2, "memory"}));
  world.run([](std::size_t rank, RawGroup& group) {
    for (int round = 0; round < 100; ++round) {
      std::atomic<bool> ran = false;
      const auto work = group.barrier();
      work->before_end([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        ran = true;
      });
      // A bounded wait leaves the operation to a thread of the pool.
      if (rank == 0) {
        while (!work->wait(std::chrono::steady_clock::now() + std::chrono::seconds(1))) continue;
      } else {
        work->wait();
      }
      EXPECT_TRUE(ran);
    }
  });
}

}  // namespace
}  // namespace tensorferry::testing
