// What becomes of sends, receives and operations when a rank leaves, gives up, or passes other sizes than its peer.
#include <gmock/gmock.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <iterator>
#include <memory>
#include <thread>

#include "tests/agent/patience.h"
#include "tests/rpc/collectives/world.h"

namespace tensorferry::testing {
namespace {

using collectives::Mailbox;
using collectives::RawGroup;
using collectives::StartOptions;
using Floats = std::vector<float>;
using ::testing::HasSubstr;

constexpr std::size_t few = 100, many = 100'000;  // elements that travel with their message, and that are fetched

void await(const std::atomic<bool>& flag) {
  while (!flag) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

/// A world in which all links of groups are tested alike.
class Leaving : public ::testing::TestWithParam<const char*> {
 protected:
  void form(std::size_t ranks) {
    world = std::make_unique<GroupWorld>(ranks);
    world->form(GroupWorld::settings_of({ranks, GetParam()}));
  }
  std::unique_ptr<GroupWorld> world;
};
INSTANTIATE_TEST_SUITE_P(, Leaving, ::testing::Values("memory", "messages"),
                         [](const auto& each) { return std::string(each.param); });

TEST_P(Leaving, ACompletedSendIsReceivedAfterItsSenderHasLeft) {
  form(2);
  std::atomic<bool> left = false;
  world->run([&](std::size_t rank, RawGroup& group) {
    Floats values(few, static_cast<float>(rank));
    if (rank == 0) {
      EXPECT_TRUE(ended(group.send(bytes_in(values), DType::float32, 1, 7)).ok());
      group.close();
      left = true;
      return;
    }
    await(left);
    Floats none(few, -1);
    const auto first = ended(group.receive(bytes_in(none), DType::float32, 0, 7));
    EXPECT_TRUE(first.ok()) << first.text();
    EXPECT_EQ(none, Floats(few, 0));
    const auto second = ended(group.receive(bytes_in(none), DType::float32, 0, 7));
    EXPECT_EQ(second.code(), Code::cancelled);
    EXPECT_THAT(second.text(), HasSubstr("rank 0 (\"rank0\") has left"));
    const auto meeting = ended(group.barrier());
    EXPECT_THAT(meeting.text(), HasSubstr("rank 0 (\"rank0\") has left"));
  });
}

TEST_P(Leaving, ALargeSendHasEndedWhenTheReceiverHasIt) {
  form(2);
  world->run([&](std::size_t rank, RawGroup& group) {
    Floats values(many, static_cast<float>(rank + 1));
    if (rank == 0) {
      const auto sent = ended(group.send(bytes_in(values), DType::float32, 1, 7));
      EXPECT_TRUE(sent.ok()) << sent.text();
      world->services[0]->leave();
      world->agents[0]->leave();
      return;
    }
    Floats got(many, -1);
    const auto received = ended(group.receive(bytes_in(got), DType::float32, 0, 7));
    EXPECT_TRUE(received.ok()) << received.text();
    EXPECT_EQ(got, Floats(many, 1));
  });
}

TEST_P(Leaving, ALargeSendEndsWhenItsReceiverDiesOrGivesUp) {
  for (const bool dies : {true, false}) {
    form(2);
    world->run([&](std::size_t rank, RawGroup& group) {
      Floats values(many), few_of_them(few);
      if (rank == 0) {
        (void)ended(group.send(bytes_in(values), DType::float32, 1, 7));  // well or not, but it ends
        return;
      }
      EXPECT_EQ(ended(group.receive(bytes_in(few_of_them), DType::float32, 0, 7)).code(), Code::invalid_argument);
      if (!dies) return group.close();
      world->services[1]->leave();
      world->agents[1]->leave();
    });
  }
}

TEST_P(Leaving, ACompletedSendIsReceivedAfterItsSenderHasDied) {
  form(2);
  std::atomic<bool> left = false;
  world->run([&](std::size_t rank, RawGroup& group) {
    Floats values(few, static_cast<float>(rank));
    if (rank == 0) {
      EXPECT_TRUE(ended(group.send(bytes_in(values), DType::float32, 1, 7)).ok());
      world->services[0]->leave();
      world->agents[0]->leave();
      left = true;
      return;
    }
    await(left);
    EXPECT_THAT(ended(group.barrier()).text(), HasSubstr("rank 0 (\"rank0\") of group \"default\" has died or left"));
    const auto received = ended(group.receive(bytes_in(values), DType::float32, 0, 7));
    EXPECT_TRUE(received.ok()) << received.text();
    EXPECT_EQ(values, Floats(few, 0));
  });
}

TEST_P(Leaving, TransfersAmongTheOthersGoOn) {
  for (const auto count : {few, many}) {
    form(3);
    std::atomic<bool> receives = false, left = false;
    world->run([&](std::size_t rank, RawGroup& group) {
      Floats values(count, static_cast<float>(rank)), got(count, -1);
      EXPECT_TRUE(ended(group.barrier()).ok());
      if (rank == 2) {
        await(receives);
        group.close();
        left = true;
        return;
      }
      if (rank == 0) {
        const auto from_one = group.receive(bytes_in(got), DType::float32, 1, 0);
        Floats anything(count), nothing(1);
        const auto from_any = group.receive(bytes_in(anything), DType::float32, Mailbox::any_rank, 1);
        const auto from_the_leaver = group.receive(bytes_in(nothing), DType::float32, 2, 0);
        receives = true;
        const auto lost = ended(from_the_leaver);
        EXPECT_EQ(lost.code(), Code::cancelled);
        EXPECT_THAT(lost.text(), HasSubstr("rank 2 (\"rank2\") has left"));
        EXPECT_TRUE(ended(from_one).ok()) << ended(from_one).text();
        EXPECT_TRUE(ended(from_any).ok()) << ended(from_any).text();
        EXPECT_EQ(from_any->letter().from, 1U);
        EXPECT_EQ(got, Floats(count, 1));
        EXPECT_EQ(anything, got);
        return;
      }
      await(left);
      while (group.failed().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_TRUE(ended(group.send(bytes_in(values), DType::float32, 0, 0)).ok());
      EXPECT_TRUE(ended(group.send(bytes_in(values), DType::float32, 0, 1)).ok());
      EXPECT_THAT(ended(group.send(bytes_in(values), DType::float32, 2, 0)).text(),
                  HasSubstr("rank 2 (\"rank2\") has"));
    });
  }
}

TEST_P(Leaving, AReceiveFromAnyRankEndsWhenNoOtherIsLeft) {
  form(3);
  world->run([&](std::size_t rank, RawGroup& group) {
    if (rank != 0) return group.close();
    Floats got(few);
    const auto lost = ended(group.receive(bytes_in(got), DType::float32, Mailbox::any_rank, 0));
    EXPECT_EQ(lost.code(), Code::cancelled);
    EXPECT_THAT(lost.text(), HasSubstr("has left"));
  });
}

TEST_P(Leaving, WhatHasBeenStartedEndsBeforeARankLeaves) {
  form(3);
  world->run([&](std::size_t rank, RawGroup& group) {
    Floats values(many, 1);
    if (rank != 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // else rank 0 waits for nothing
    const auto sum = group.all_reduce(bytes_in(values), bytes_in(values), DType::float32, Reduction::sum);
    if (rank == 0) {
      EXPECT_TRUE(group.end_started());
      EXPECT_TRUE(sum->done());
      group.close();
    }
    EXPECT_TRUE(ended(sum).ok()) << ended(sum).text();
    EXPECT_EQ(values, Floats(many, 3));
  });
}

TEST_P(Leaving, AnInterruptionEndsTheWaitForWhatHasBeenStarted) {
  form(2);
  std::atomic<bool> interrupted = false;
  world->run([&](std::size_t rank, RawGroup& group) {
    if (rank != 0) return await(interrupted);
    const auto barrier = group.barrier();
    EXPECT_FALSE(group.end_started([] { return true; }));
    interrupted = true;
  });
}

TEST_P(Leaving, TheLateRankIsToldThatItIsTheOne) {
  form(2);
  world->run([&](std::size_t rank, RawGroup& group) {
    if (rank == 0) {
      EXPECT_EQ(ended(group.barrier({std::chrono::milliseconds(100), true, nullptr})).code(), Code::deadline_exceeded);
      return;
    }
    while (group.failed().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto late = ended(group.barrier());
    EXPECT_EQ(late.code(), Code::deadline_exceeded);
    EXPECT_THAT(late.text(), HasSubstr("rank 0 (\"rank0\") gave up: barrier() of group"));
    EXPECT_THAT(late.text(), HasSubstr("rank 1 (\"rank1\", this rank) had not come"));
  });
}

/// Returns the open descriptors, the threads, and the mappings of this process.
std::array<std::size_t, 3> held() {
  std::ifstream maps("/proc/self/maps");
  const auto lines = std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
  return {open_descriptors(), threads(), static_cast<std::size_t>(lines)};
}

TEST(DroppedGroups, GiveTheirDescriptorsThreadsAndMemoryBack) {
  GroupWorld world(2);
  const auto form_and_drop = [&](int number) {
    auto settings = GroupWorld::settings_of({2, "memory"});
    settings.label = "group " + std::to_string(number);
    world.form(settings);
    world.run([](std::size_t, RawGroup& group) {
      Floats values(many, 1);
      const auto sum = ended(group.all_reduce(bytes_in(values), bytes_in(values), DType::float32, Reduction::sum));
      EXPECT_TRUE(sum.ok()) << sum.text();
    });
    world.groups.clear();
  };
  constexpr int first = 10, more = 100;  // the first ones make what the agents keep
  for (int number = 0; number < first; ++number) form_and_drop(number);
  const auto before = held();
  const auto used = ::mallinfo2().uordblks;
  for (int number = first; number < first + more; ++number) form_and_drop(number);
  constexpr std::size_t slack = 10;  // far below one for each group
  EXPECT_TRUE(eventually([&] {
    const auto now = held();
    return std::ranges::equal(now, before, [](auto a, auto b) { return a <= b + slack; });
  })) << ::testing::PrintToString(before)
      << ::testing::PrintToString(held());
  if (!under_sanitizer) {
    EXPECT_LT(::mallinfo2().uordblks, used + (1U << 20));
  }
}

// The word of a rank that gives up is a message; that it withdraws its data is seen in shared memory, so earlier.
TEST(Reasons, TheFirstOneWinsOverAWithdrawalThatComesBeforeIt) {
  constexpr int most_threads = 2;
  GroupWorld world(2, [](RawAgentOptions& options) { options.max_threads = most_threads; });
  auto settings = GroupWorld::settings_of({2, "memory"});
  settings.algorithms = "reduce=one_shot";
  world.form(settings);
  std::atomic<bool> let_go = false, gave_up = false;
  std::atomic<int> held = 0;
  world.agents[1]->serve("hold", [&](Request, Reply reply) {  // holds a thread that handles messages
    ++held;
    await(let_go);
    reply.send({});
  });
  std::thread releaser;
  world.run([&](std::size_t rank, RawGroup& group) {
    Floats values(2 * many, 1);
    ReduceOp op(Reduction::custom);
    op.combine = [&](void*, const void*, std::size_t, DType) { await(gave_up); };
    StartOptions options;
    options.background = false;
    if (rank == 1) {
      const auto status = ended(group.reduce(bytes_in(values), bytes_in(values), DType::float32, op, 1, options));
      EXPECT_EQ(status.code(), Code::deadline_exceeded) << status.text();
      EXPECT_THAT(status.text(), HasSubstr("rank 0 (\"rank0\") gave up: reduce("));
      return;
    }
    std::vector<Call> calls;
    for (int i = 0; i < 2 * most_threads; ++i) {
      calls.push_back(world.agents[0]->call("rank1", "hold", {}, within(std::chrono::seconds(60))));
    }
    while (held < most_threads) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    options.timeout = std::chrono::milliseconds(200);
    EXPECT_EQ(ended(group.reduce(bytes_in(values), bytes_in(values), DType::float32, op, 1, options)).code(),
              Code::deadline_exceeded);
    releaser = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      let_go = true;
    });
    gave_up = true;
    for (auto& call : calls) call.wait();
  });
  releaser.join();
}

TEST_P(Leaving, AReceiveOfAnotherDtypeOrSizeNamesBothSides) {
  form(2);
  world->run([&](std::size_t rank, RawGroup& group) {
    for (const auto count : {few, many}) {
      Floats values(count, 1);
      std::vector<double> doubles(count / 2);
      Floats more(count + 1), fewer(count - 1);
      for (std::uint64_t tag = 0; tag < 3; ++tag) {
        if (rank == 0) {
          const auto sent = ended(group.send(bytes_in(values), DType::float32, 1, tag));
          if (count == many) {
            EXPECT_EQ(sent.code(), Code::invalid_argument);
            EXPECT_THAT(sent.text(), HasSubstr("rank 0 (\"rank0\") sent 100000 float32 elements with tag"));
          }
          continue;
        }
        const auto received = tag == 0   ? group.receive(bytes_in(doubles), DType::float64, 0, tag)
                              : tag == 1 ? group.receive(bytes_in(more), DType::float32, 0, tag)
                                         : group.receive(bytes_in(fewer), DType::float32, Mailbox::any_rank, tag);
        EXPECT_EQ(ended(received).code(), Code::invalid_argument);
        const auto text = ended(received).text();
        EXPECT_THAT(text, HasSubstr("sent " + std::to_string(count) + " float32 elements with tag"));
        EXPECT_THAT(text, HasSubstr("the receive of rank 1 (\"rank1\") takes " +
                                    (tag == 0 ? std::to_string(count / 2) + " float64" : "")));
      }
    }
    EXPECT_TRUE(ended(group.barrier()).ok());  // the group goes on
  });
}

TEST_P(Leaving, GatherAndScatterTakeUnevenPieces) {
  form(3);
  world->run([&](std::size_t rank, RawGroup& group) {
    for (const auto count : {few, many}) {
      std::vector<Floats> pieces;
      for (std::size_t each = 0; each < 3; ++each) pieces.emplace_back(count + each, rank == 1 ? 0 : each);
      std::vector<RawGroup::OutBytes> outputs;
      if (rank == 1) outputs = {bytes_in(pieces[0]), bytes_in(pieces[1]), bytes_in(pieces[2])};
      Floats own(count + rank, static_cast<float>(rank));
      EXPECT_TRUE(ended(group.gather(bytes_in(own), outputs, DType::float32, 1)).ok());
      for (std::size_t each = 0; rank == 1 && each < 3; ++each) {
        EXPECT_EQ(pieces[each], Floats(count + each, static_cast<float>(each)));
      }
      const std::vector<RawGroup::InBytes> inputs(outputs.begin(), outputs.end());
      own.assign(count + rank, -1);
      EXPECT_TRUE(ended(group.scatter(inputs, bytes_in(own), DType::float32, 1)).ok());
      EXPECT_EQ(own, Floats(count + rank, static_cast<float>(rank)));
    }
    // If the root's pieces have one size, another size is refused everywhere, and the group goes on.
    std::vector<Floats> even(rank == 0 ? 3 : 0, Floats(few));
    std::vector<RawGroup::OutBytes> outputs;
    for (auto& each : even) outputs.push_back(bytes_in(each));
    Floats odd(few + (rank == 2 ? 1 : 0));
    const auto refused = ended(group.gather(bytes_in(odd), outputs, DType::float32, 0));
    EXPECT_EQ(refused.code(), Code::invalid_argument);
    EXPECT_THAT(refused.text(), HasSubstr("rank 2 (\"rank2\") called gather"));
    EXPECT_TRUE(ended(group.barrier()).ok());
  });
}

}  // namespace
}  // namespace tensorferry::testing
