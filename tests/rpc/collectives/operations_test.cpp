#include <array>
#include <atomic>
#include <cstring>

#include "channels/region.h"
#include "rpc/collectives/step.h"
#include "tests/agent/patience.h"
#include "tests/rpc/collectives/world.h"

namespace tensorferry::testing {
namespace {

using collectives::RawGroup;
using Values = std::vector<std::int64_t>;

/// The value of `rank` at `index`: small, and different at each.
std::int64_t value_of(std::size_t rank, std::size_t index) {
  return static_cast<std::int64_t>(1000 * rank + index % 997);
}
Values values_of(std::size_t rank, std::size_t count, std::size_t first = 0) {
  Values out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = value_of(rank, first + i);
  return out;
}
Values sum_of(std::size_t ranks, std::size_t count, std::size_t first = 0) {
  Values out(count);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t rank = 0; rank < ranks; ++rank) out[i] += value_of(rank, first + i);
  }
  return out;
}

using collectives::ExchangeStep;
using collectives::overwrites_given;

// A copy of a large tensor costs more than the step itself.
TEST(Step, ThatLeavesTheRanksOwnBytesInPlaceOverwritesNothing) {
  std::array<std::byte, 4> bytes{};
  ExchangeStep step(2);
  step.give = {bytes, bytes};
  step.take = {bytes.size(), 0};
  step.into = {bytes.data(), nullptr};
  EXPECT_FALSE(overwrites_given(step, 0));
}

TEST(Step, ThatMovesTheRanksOwnBytesOverWhatItGivesOverwritesIt) {
  std::array<std::byte, 8> bytes{};
  ExchangeStep step(2);
  step.give = {std::span(bytes).first(4), std::span(bytes).last(4)};
  step.take = {4, 0};
  step.into = {bytes.data() + 2, nullptr};
  EXPECT_TRUE(overwrites_given(step, 0));
}

TEST(Step, ThatTakesAnotherRanksBytesIntoWhatItGivesOverwritesIt) {
  std::array<std::byte, 4> bytes{};
  ExchangeStep step(2);
  step.give = {bytes, bytes};
  step.take = {0, bytes.size()};
  step.into = {nullptr, bytes.data()};
  EXPECT_TRUE(overwrites_given(step, 0));
}

/// From empty to more than a slot holds, and sizes that no number of ranks divides.
constexpr std::array<std::size_t, 6> counts{0, 1, 7, 1000, 5003, 70001};

class Operations : public ::testing::TestWithParam<GroupShape> {
 protected:
  void SetUp() override {
    world = std::make_unique<GroupWorld>(GetParam().ranks);
    world->form(GroupWorld::settings_of(GetParam()), {}, GetParam().hosts);
  }
  /// Runs `body` at each rank, for each size.
  void each_size(const std::function<void(std::size_t rank, RawGroup& group, std::size_t count)>& body) {
    for (const auto count : counts) {
      SCOPED_TRACE(count);
      world->run([&](std::size_t rank, RawGroup& group) { body(rank, group, count); });
    }
  }
  std::unique_ptr<GroupWorld> world;
  const std::size_t ranks = GetParam().ranks;
};

TEST_P(Operations, AllReduceGivesEachRankTheSumInPlaceAndOutOfPlace) {
  each_size([&](std::size_t rank, RawGroup& group, std::size_t count) {
    auto values = values_of(rank, count);
    Values out(count, -1);
    EXPECT_TRUE(ended(group.all_reduce(bytes_in(values), bytes_in(out), DType::int64, Reduction::sum)).ok());
    EXPECT_EQ(out, sum_of(ranks, count));
    EXPECT_EQ(values, values_of(rank, count)) << "an input was written";
    EXPECT_TRUE(ended(group.all_reduce(bytes_in(values), bytes_in(values), DType::int64, Reduction::sum)).ok());
    EXPECT_EQ(values, sum_of(ranks, count));
  });
}

TEST_P(Operations, ReduceGivesTheRootAloneTheSum) {
  for (std::size_t root = 0; root < ranks; ++root) {
    each_size([&](std::size_t rank, RawGroup& group, std::size_t count) {
      auto values = values_of(rank, count);
      const auto status = ended(group.reduce(bytes_in(values), bytes_in(values), DType::int64, Reduction::sum, root));
      EXPECT_TRUE(status.ok()) << status.text();
      EXPECT_EQ(values, rank == root ? sum_of(ranks, count) : values_of(rank, count));
    });
  }
}

TEST_P(Operations, BroadcastGivesEachRankTheRootsValues) {
  for (std::size_t root = 0; root < ranks; ++root) {
    each_size([&](std::size_t rank, RawGroup& group, std::size_t count) {
      auto values = values_of(rank, count);
      EXPECT_TRUE(ended(group.broadcast(bytes_in(values), DType::int64, root)).ok());
      EXPECT_EQ(values, values_of(root, count));
    });
  }
}

TEST_P(Operations, AllGatherTakesInputsOfDifferentSizes) {
  each_size([&](std::size_t rank, RawGroup& group, std::size_t count) {
    auto values = values_of(rank, count + rank);
    std::vector<Values> out;
    std::vector<std::span<std::byte>> outputs;
    for (std::size_t from = 0; from < ranks; ++from) out.emplace_back(count + from, -1);
    for (auto& each : out) outputs.push_back(bytes_in(each));
    EXPECT_TRUE(ended(group.all_gather(bytes_in(values), outputs, DType::int64, false)).ok());
    for (std::size_t from = 0; from < ranks; ++from) EXPECT_EQ(out[from], values_of(from, count + from));
  });
}

TEST_P(Operations, AllGatherWorksInPlace) {
  each_size([&](std::size_t rank, RawGroup& group, std::size_t count) {
    Values all(count * ranks, -1);
    std::copy_n(values_of(rank, count).begin(), count, all.begin() + static_cast<std::ptrdiff_t>(rank * count));
    std::vector<std::span<std::byte>> outputs;
    for (std::size_t from = 0; from < ranks; ++from)
      outputs.push_back(bytes_in(all).subspan(from * count * 8, count * 8));
    EXPECT_TRUE(ended(group.all_gather(outputs[rank], outputs, DType::int64, true)).ok());
    for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], value_of(i / count, i % count));
  });
}

TEST_P(Operations, GatherAndScatterAreEachOthersInverse) {
  for (std::size_t root = 0; root < ranks; ++root) {
    each_size([&](std::size_t rank, RawGroup& group, std::size_t count) {
      auto values = values_of(rank, count);
      std::vector<Values> all(ranks, Values(count, -1));
      std::vector<std::span<std::byte>> outputs;
      for (auto& each : all) outputs.push_back(bytes_in(each));
      EXPECT_TRUE(ended(group.gather(bytes_in(values), outputs, DType::int64, root)).ok());
      for (std::size_t from = 0; rank == root && from < ranks; ++from) EXPECT_EQ(all[from], values_of(from, count));
      Values back(count, -1);
      const std::vector<std::span<const std::byte>> inputs(outputs.begin(), outputs.end());
      EXPECT_TRUE(ended(group.scatter(inputs, bytes_in(back), DType::int64, root)).ok());
      EXPECT_EQ(back, values);
    });
  }
}

TEST_P(Operations, ReduceScatterGivesEachRankItsShare) {
  each_size([&](std::size_t rank, RawGroup& group, std::size_t count) {
    auto values = values_of(rank, count * ranks);
    std::vector<std::span<const std::byte>> inputs;
    for (std::size_t to = 0; to < ranks; ++to) inputs.emplace_back(bytes_in(values).subspan(to * count * 8, count * 8));
    Values out(count, -1);
    EXPECT_TRUE(ended(group.reduce_scatter(inputs, bytes_in(out), DType::int64, Reduction::sum)).ok());
    EXPECT_EQ(out, sum_of(ranks, count, rank * count));
    // Over the input's beginning, which another rank reads.
    EXPECT_TRUE(
        ended(group.reduce_scatter(inputs, bytes_in(values).first(count * 8), DType::int64, Reduction::sum)).ok());
    EXPECT_EQ(Values(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count)), out);
  });
}

TEST_P(Operations, ReduceScatterTakesPiecesOfDifferentSizes) {
  // The piece for rank r has count + 2000 r elements.
  each_size([&](std::size_t rank, RawGroup& group, std::size_t count) {
    std::vector<Values> pieces;
    std::vector<std::span<const std::byte>> inputs;
    for (std::size_t to = 0; to < ranks; ++to) pieces.push_back(values_of(rank, count + 2000 * to, to));
    for (auto& each : pieces) inputs.emplace_back(bytes_in(each));
    Values out(count + 2000 * rank, -1);
    const auto status = ended(group.reduce_scatter(inputs, bytes_in(out), DType::int64, Reduction::sum));
    EXPECT_TRUE(status.ok()) << status.text();
    EXPECT_EQ(out, sum_of(ranks, count + 2000 * rank, rank));
  });
}

TEST_P(Operations, LargeTensorsGoInManyChunks) {
  const std::size_t count = 1'000'001;  // 8 MB: a ring of five has shares of more than three chunks
  const auto sum = sum_of(ranks, count), last = values_of(ranks - 1, count);
  world->run([&](std::size_t rank, RawGroup& group) {
    auto values = values_of(rank, count);
    EXPECT_TRUE(ended(group.all_reduce(bytes_in(values), bytes_in(values), DType::int64, Reduction::sum)).ok());
    EXPECT_EQ(values, sum);
    values = values_of(rank, count);
    EXPECT_TRUE(ended(group.broadcast(bytes_in(values), DType::int64, ranks - 1)).ok());
    EXPECT_EQ(values, last);
  });
}

TEST_P(Operations, AllToAllTakesPartsOfDifferentSizes) {
  // Rank a gives count + a + 2 b elements to rank b.
  each_size([&](std::size_t rank, RawGroup& group, std::size_t count) {
    std::vector<Values> in, out;
    std::vector<std::span<const std::byte>> inputs;
    std::vector<std::span<std::byte>> outputs;
    for (std::size_t other = 0; other < ranks; ++other) {
      in.push_back(values_of(rank, count + rank + 2 * other, other));
      out.emplace_back(count + other + 2 * rank, -1);
    }
    for (auto& each : in) inputs.emplace_back(bytes_in(each));
    for (auto& each : out) outputs.push_back(bytes_in(each));
    EXPECT_TRUE(ended(group.all_to_all(inputs, outputs, DType::int64, false)).ok());
    for (std::size_t from = 0; from < ranks; ++from)
      EXPECT_EQ(out[from], values_of(from, count + from + 2 * rank, rank));
  });
}

TEST_P(Operations, AllToAllWritesItsOutputsOverItsInputs) {
  // Rank a gives count + (b - a) modulo n elements to rank b: in the same memory, outputs begin where no input does.
  const auto between = [&](std::size_t from, std::size_t to, std::size_t count) {
    return count + (to + ranks - from) % ranks;
  };
  each_size([&](std::size_t rank, RawGroup& group, std::size_t count) {
    Values memory, expected;
    std::vector<std::span<const std::byte>> inputs;
    std::vector<std::span<std::byte>> outputs;
    for (std::size_t other = 0; other < ranks; ++other) {
      const auto given = values_of(rank, between(rank, other, count), other);
      const auto taken = values_of(other, between(other, rank, count), rank);
      memory.insert(memory.end(), given.begin(), given.end());
      expected.insert(expected.end(), taken.begin(), taken.end());
    }
    std::size_t in = 0, out = 0;
    for (std::size_t other = 0; other < ranks; ++other) {
      inputs.emplace_back(bytes_in(memory).subspan(in, 8 * between(rank, other, count)));
      outputs.emplace_back(bytes_in(memory).subspan(out, 8 * between(other, rank, count)));
      in += inputs.back().size();
      out += outputs.back().size();
    }
    EXPECT_TRUE(ended(group.all_to_all(inputs, outputs, DType::int64, false)).ok());
    EXPECT_EQ(memory, expected);
  });
}

TEST_P(Operations, BarrierEndsWhenAllRanksHaveCome) {
  std::atomic<std::size_t> came = 0;
  for (int round = 1; round <= 20; ++round) {
    world->run([&](std::size_t, RawGroup& group) {
      ++came;
      EXPECT_TRUE(ended(group.barrier()).ok());
      EXPECT_GE(came.load(), static_cast<std::size_t>(round) * ranks);
    });
  }
}

TEST_P(Operations, ManyOperationsInARowKeepTheirOrder) {
  world->run([&](std::size_t rank, RawGroup& group) {
    std::vector<Values> values;
    std::vector<std::shared_ptr<collectives::GroupWork>> works;
    for (std::size_t i = 0; i < 50; ++i) values.push_back(values_of(rank + i, i % 5 == 0 ? 20000 : 10));
    for (auto& each : values) {
      works.push_back(group.all_reduce(bytes_in(each), bytes_in(each), DType::int64, Reduction::max));
    }
    for (std::size_t i = 0; i < works.size(); ++i) {
      EXPECT_TRUE(ended(works[i]).ok());
      EXPECT_EQ(works[i]->number(), i + 1);
      EXPECT_EQ(values[i], values_of(ranks - 1 + i, values[i].size()));
    }
    EXPECT_EQ(group.progress().first, 50U);
  });
}

// A thread that waits may run operations itself. One behind that which it waits for may need what the program does
// next.
TEST_P(Operations, AThreadThatWaitsForOneOfThemRunsNoneBehindIt) {
  std::atomic<int> waited = 0;  // rounds whose first operation rank 0 has seen the end of
  world->run([&](std::size_t rank, RawGroup& group) {
    for (int round = 1; round <= 100; ++round) {
      const auto first = group.barrier();
      auto second = rank == 0 ? group.barrier() : nullptr;
      ASSERT_TRUE(ended(first).ok());
      if (rank == 0) {
        waited = round;
      } else {
        ASSERT_TRUE(eventually([&] { return waited >= round; })) << round;
        second = group.barrier();
      }
      ASSERT_TRUE(ended(second).ok());
    }
  });
}

TEST_P(Operations, SendsOfOneTagArriveInOrderAndTagsDoNotMix) {
  world->run([&](std::size_t rank, RawGroup& group) {
    const auto to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
    std::vector<Values> out, in;
    std::vector<std::shared_ptr<collectives::GroupWork>> works;
    for (std::size_t i = 0; i < 12; ++i) {
      out.push_back(values_of(rank, i % 3 == 0 ? 30000 : i, i));
      in.emplace_back(out.back().size(), -1);
    }
    for (std::size_t i = 0; i < 12; ++i) works.push_back(group.send(bytes_in(out[i]), DType::int64, to, i % 2));
    for (const std::size_t odd : {1, 0}) {  // the tags in the other order
      for (std::size_t i = odd; i < 12; i += 2)
        works.push_back(group.receive(bytes_in(in[i]), DType::int64, from, i % 2));
    }
    for (const auto& work : works) EXPECT_TRUE(ended(work).ok()) << ended(work).text();
    for (std::size_t i = 0; i < 12; ++i) EXPECT_EQ(in[i], values_of(from, in[i].size(), i));
  });
}

TEST_P(Operations, ReceiveFromAnyRankSaysFromWhich) {
  world->run([&](std::size_t rank, RawGroup& group) {
    Values mine = values_of(rank, 20000);
    if (rank != 0) {
      EXPECT_TRUE(ended(group.send(bytes_in(mine), DType::int64, 0, 3)).ok());
      return;
    }
    std::vector<bool> seen(ranks);
    for (std::size_t i = 1; i < ranks; ++i) {
      const auto work = group.receive(bytes_in(mine), DType::int64, collectives::Mailbox::any_rank, 3);
      EXPECT_TRUE(ended(work).ok());
      EXPECT_EQ(mine, values_of(work->letter().from, 20000));
      EXPECT_FALSE(seen[work->letter().from]);
      seen[work->letter().from] = true;
    }
  });
}

TEST_P(Operations, ReadRegionsInPlace) {
  world->run([&](std::size_t rank, RawGroup& group) {
    constexpr std::size_t count = 40000;
    auto region = Regions::of_this_process().make(count * 8);
    ASSERT_TRUE(region.ok());
    const std::span<std::byte> bytes(region->data, region->bytes);
    for (int round = 0; round < 3; ++round) {
      const auto values = values_of(rank, count);
      std::memcpy(bytes.data(), values.data(), bytes.size());
      const auto status = ended(group.all_reduce(bytes, bytes, DType::int64, Reduction::sum));
      EXPECT_TRUE(status.ok()) << status.text();
      EXPECT_EQ(std::memcmp(bytes.data(), sum_of(ranks, count).data(), bytes.size()), 0);
    }
    EXPECT_TRUE(ended(group.barrier()).ok());
  });
}

/// In soak all shapes. Otherwise each kind of links, with few or many ranks, with and without the ring, and two hosts.
std::vector<GroupShape> shapes() {
  std::vector<GroupShape> out{{1, "memory"},           {3, "memory"},         {2, "mail"},
                              {5, "messages"},         {2, "messages", true}, {3, "memory", true},
                              {3, "memory", false, 2}, {5, "mail", false, 2}};
  const std::vector<GroupShape> others{{2, "memory"},         {5, "memory"},        {4, "mail"},
                                       {2, "messages"},       {3, "messages"},      {1, "memory", true},
                                       {3, "messages", true}, {5, "messages", true}};
  if (is_soak) out.insert(out.end(), others.begin(), others.end());
  return out;
}
INSTANTIATE_TEST_SUITE_P(, Operations, ::testing::ValuesIn(shapes()),
                         [](const auto& each) { return name_of(each.param); });

}  // namespace
}  // namespace tensorferry::testing
