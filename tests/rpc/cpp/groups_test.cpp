#include <latch>
#include <numeric>
#include <thread>
#include <vector>

#include "tensorferry/group.h"
#include "tests/rpc/cpp/typed_agents.h"

namespace {

using namespace tensorferry;
using namespace tensorferry::testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Floats = std::vector<float>;

Tensor floats(Floats values) { return Tensor::from_vector(std::move(values)); }
Floats values_of(const Tensor& tensor) {
  const auto dense = tensor.contiguous();
  const auto elements = dense.elements<float>();
  return {elements.begin(), elements.end()};
}

/// Three agents in one process, and a group over them. Each rank runs on a thread of its own.
class TypedGroups : public ::testing::Test {
 protected:
  static constexpr std::size_t size = 3;

  void SetUp() override {
    for (std::size_t rank = 0; rank < size; ++rank) {
      names.push_back("rank" + std::to_string(rank));
      agents.push_back(join(store, names.back()));
    }
    groups.resize(size);
    on_each([&](std::size_t rank) { groups[rank] = Group::form(*agents[rank], names, {.timeout = patience}); });
  }
  void TearDown() override {
    groups.clear();
    for (const auto& agent : agents) agent->leave();
  }
  /// Runs `body` for all ranks at once. What it throws fails the test.
  static void on_each(const std::function<void(std::size_t)>& body) {
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < size; ++rank) {
      threads.emplace_back([&body, rank] { EXPECT_NO_THROW(body(rank)) << "at rank " << rank; });
    }
    for (auto& thread : threads) thread.join();
  }
  void run(const std::function<void(std::size_t rank, Group& group)>& body) {
    on_each([&](std::size_t rank) { body(rank, *groups[rank]); });
  }

  std::shared_ptr<Store> store = local_store();
  std::vector<std::string> names;
  std::vector<std::shared_ptr<Agent>> agents;
  std::vector<std::shared_ptr<Group>> groups;
};

TEST_F(TypedGroups, KnowTheirRanksAndNames) {
  for (std::size_t rank = 0; rank < size; ++rank) {
    EXPECT_EQ(groups[rank]->rank(), rank);
    EXPECT_EQ(groups[rank]->size(), size);
    EXPECT_EQ(groups[rank]->names(), names);
    EXPECT_EQ(groups[rank]->label(), "default");
  }
}

TEST_F(TypedGroups, Reduce) {
  run([](std::size_t rank, Group& group) {
    const auto own = static_cast<float>(rank);
    EXPECT_THAT(values_of(group.all_reduce(floats({own, 1})).get()), ElementsAre(3, 3));
    const auto input = floats({own + 1, 2}), output = floats({0, 0});
    EXPECT_THAT(values_of(group.all_reduce(input, output, Reduction::product).get()), ElementsAre(6, 8));
    EXPECT_THAT(values_of(input), ElementsAre(own + 1, 2)) << "the input is unchanged";
    EXPECT_THAT(values_of(group.all_reduce(floats({own}), Reduction::average).get()), ElementsAre(1));

    const auto at_root = values_of(group.reduce(floats({own}), 1, Reduction::max).get());
    if (rank == 1) {
      EXPECT_THAT(at_root, ElementsAre(2));
    }
    const auto into = floats({-1});
    group.reduce(floats({own}), into, 2).get();
    EXPECT_THAT(values_of(into), ElementsAre(rank == 2 ? 3 : -1));

    const auto both = group.all_reduce_coalesced({floats({own}), floats({1, own})}).get();
    ASSERT_EQ(both.size(), 2U);
    EXPECT_THAT(values_of(both[0]), ElementsAre(3));
    EXPECT_THAT(values_of(both[1]), ElementsAre(3, 3));
  });
}

TEST_F(TypedGroups, ReduceByAFunctionOfTheProgram) {
  run([](std::size_t rank, Group& group) {
    ReduceOp op(Reduction::custom);
    op.combine = [](void* accumulator, const void* other, std::size_t count, DType) {
      for (std::size_t i = 0; i < count; ++i) {
        auto& into = static_cast<float*>(accumulator)[i];
        into = 10 * into + static_cast<const float*>(other)[i];
      }
    };
    EXPECT_THAT(values_of(group.all_reduce(floats({static_cast<float>(rank + 1)}), op).get()), ElementsAre(123));
  });
}

TEST_F(TypedGroups, BroadcastGatherAndScatter) {
  run([](std::size_t rank, Group& group) {
    const auto own = static_cast<float>(rank);
    EXPECT_THAT(values_of(group.broadcast(floats({own, own}), 2).get()), ElementsAre(2, 2));

    const auto all = group.all_gather(floats({own, 7})).get();
    ASSERT_EQ(all.size(), size);
    for (std::size_t from = 0; from < size; ++from) {
      EXPECT_THAT(values_of(all[from]), ElementsAre(static_cast<float>(from), 7));
    }
    const auto uneven =
        group.all_gather(floats(Floats(rank + 1, own)), {floats({9}), floats({9, 9}), floats({9, 9, 9})}).get();
    EXPECT_THAT(values_of(uneven[1]), ElementsAre(1, 1));
    EXPECT_THAT(values_of(uneven[2]), ElementsAre(2, 2, 2));

    const auto gathered = group.gather(floats({own}), 1).get();
    ASSERT_EQ(gathered.size(), rank == 1 ? size : 0U);
    if (rank == 1) {
      EXPECT_THAT(values_of(gathered[2]), ElementsAre(2));
    }
    const auto parts = rank == 0 ? Group::Tensors{floats({4}), floats({5}), floats({6})} : Group::Tensors();
    EXPECT_THAT(values_of(group.scatter(parts, floats({0})).get()), ElementsAre(own + 4));
    const Group::Tensors ones{floats({own}), floats({own + 1}), floats({own + 2})};
    EXPECT_THAT(values_of(group.reduce_scatter(ones, floats({0})).get()), ElementsAre(3 + 3 * own));
    const auto swapped = group.all_to_all(ones, {floats({0}), floats({0}), floats({0})}).get();
    for (std::size_t from = 0; from < size; ++from) {
      EXPECT_THAT(values_of(swapped[from]), ElementsAre(static_cast<float>(from) + own));
    }
  });
}

TEST_F(TypedGroups, TakeStridedAndEmptyTensors) {
  run([](std::size_t rank, Group& group) {
    // The columns of [[0, 1], [2, 3], [4, 5]].
    auto memory = std::make_shared<Floats>(6);
    std::iota(memory->begin(), memory->end(), 0.F);
    const auto columns = Tensor::from_memory(memory->data(), {2, 3}, DType::float32, memory, {1, 2});
    group.all_reduce(columns).get();
    EXPECT_THAT(*memory, ElementsAre(0, 3, 6, 9, 12, 15));
    const auto second = Tensor::from_memory(memory->data() + 1, {3}, DType::float32, memory, {2});
    group.broadcast(rank == 0 ? second : floats({0, 0, 0})).get();
    const auto received = floats({0, 0, 0});
    group.all_reduce_coalesced({second, received}).get();
    EXPECT_THAT(*memory, ElementsAre(0, 9, 6, 27, 12, 45)) << "the first column is unchanged";
    EXPECT_EQ(group.all_reduce(Tensor::empty({0, 4}, DType::float32)).get().size(), 0U);
    EXPECT_THAT(values_of(group.all_reduce(Tensor::scalar(2.F)).get()), ElementsAre(6));
  });
}

TEST_F(TypedGroups, SendAndReceive) {
  run([](std::size_t rank, Group& group) {
    const auto tensor = floats({static_cast<float>(rank), 1});
    if (rank == 0) {
      std::vector<std::size_t> from;
      for (int i = 0; i < 2; ++i) {
        from.push_back(group.receive(tensor, {}, 5).get());
        EXPECT_EQ(tensor.elements<float>()[0], static_cast<float>(from.back()));
      }
      EXPECT_NE(from[0], from[1]);
    } else {
      group.send(tensor, 0, 5).get();
    }
  });
  auto lost = groups[0]->receive(floats({0}), 1, 7, 30ms);
  EXPECT_THAT(thrown_by<DeadlineExceeded>([&] { lost.get(); }), HasSubstr("timeout"));
  run([](std::size_t, Group& group) { group.barrier().get(); });
}

TEST_F(TypedGroups, GiveFuturesThatContinueAndCoroutinesThatAwait) {
  run([](std::size_t rank, Group& group) {
    auto sum = group.all_reduce(floats({static_cast<float>(rank)})).then([](const Tensor& tensor) {
      return static_cast<int>(tensor.item<float>());
    });
    EXPECT_EQ(sum.get(), 3);
    const auto future = group.barrier();
    EXPECT_TRUE(future.wait_for(patience));
    EXPECT_TRUE(future.done());
  });
}

Future<float> sum_twice(std::shared_ptr<Group> group, Tensor tensor) {
  co_await group->all_reduce(tensor);
  const auto out = co_await group->all_reduce(tensor);
  co_return out.item<float>();
}

TEST_F(TypedGroups, AreUsedByCoroutines) {
  on_each([&](std::size_t rank) { EXPECT_EQ(sum_twice(groups[rank], Tensor::scalar(1.F)).get(), 9); });
}

TEST_F(TypedGroups, SplitAndMerge) {
  run([&](std::size_t rank, Group& group) {
    const auto part = group.split(rank == 1 ? std::nullopt : std::optional<std::int64_t>(7), -static_cast<int>(rank));
    ASSERT_EQ(part == nullptr, rank == 1);
    if (part) {
      EXPECT_THAT(part->names(), ElementsAre("rank2", "rank0"));
      EXPECT_EQ(part->label(), "default/7");
      EXPECT_THAT(values_of(part->all_reduce(floats({1})).get()), ElementsAre(2));
      const auto whole = part->merge({"rank1", "rank0"});
      EXPECT_THAT(whole->names(), ElementsAre("rank2", "rank0", "rank1"));
      EXPECT_THAT(values_of(whole->all_reduce(floats({1})).get()), ElementsAre(3));
    } else {
      const auto whole = Group::form(*agents[1], {"rank2", "rank0", "rank1"}, {.label = "default/7/merged"});
      EXPECT_THAT(values_of(whole->all_reduce(floats({1})).get()), ElementsAre(3));
    }
  });
}

TEST_F(TypedGroups, RefuseArgumentsThatMakeNoSense) {
  auto& group = *groups[0];
  const auto refused = [](const auto& call) { return thrown_by<InvalidArgument>(call); };
  const auto on_gpu = Tensor::from_memory(&group, {1}, DType::uint8, nullptr, {}, {DeviceType::cuda, 0});
  EXPECT_THAT(refused([&] { group.broadcast(floats({1}), size); }), HasSubstr("a group of 3 ranks has no rank 3"));
  EXPECT_THAT(refused([&] { group.all_reduce(on_gpu); }), HasSubstr("tensors of the CPU, not of cuda:0"));
  EXPECT_THAT(refused([&] { group.all_reduce(floats({1}), floats({1, 2})); }), HasSubstr("several sizes"));
  EXPECT_THAT(refused([&] { group.all_reduce(floats({1}), Reduction::bxor); }), HasSubstr("bxor"));
  EXPECT_THAT(refused([&] { group.all_gather(floats({1}), Group::Tensors{floats({1})}); }), HasSubstr("for 3 ranks"));
  EXPECT_THAT(refused([&] { group.barrier(-1ms); }), HasSubstr("negative"));
  EXPECT_THAT(refused([&] { return group.explain("reverse", 1); }), HasSubstr("no operation \"reverse\""));
  EXPECT_THAT(refused([&] { Group::form(*agents[0], {"rank1"}); }), HasSubstr("this agent's (\"rank0\")"));
  EXPECT_THAT(refused([&] { Group::form(*agents[0], names, {.algorithms = "all_reduce=fast"}); }),
              HasSubstr("all_reduce=fast"));
  run([](std::size_t, Group& each) { each.barrier().get(); });  // nothing was started
}

TEST_F(TypedGroups, NameTheRankThatCalledAnotherOperation) {
  run([](std::size_t rank, Group& group) {
    auto future = rank == 1 ? group.all_reduce(floats({1, 2})) : group.all_reduce(floats({1}));
    EXPECT_THAT(thrown_by<InvalidArgument>([&] { future.get(); }), HasSubstr("rank 1"));
    EXPECT_THAT(values_of(group.all_reduce(floats({1})).get()), ElementsAre(3)) << "the group goes on";
  });
}

TEST_F(TypedGroups, TakeTheAlgorithmThatACallAsksFor) {
  run([](std::size_t rank, Group& group) {
    for (const std::string_view algorithm : {"one_shot", "two_shot", "ring"}) {
      const auto own = floats({1, 2, 3});
      EXPECT_THAT(values_of(group.all_reduce(own, Reduction::sum, {}, algorithm).get()), ElementsAre(3, 6, 9));
    }
    const auto differ = [&] {
      (void)group.all_reduce(floats({1}), Reduction::sum, {}, rank == 1 ? "ring" : "one_shot").get();
    };
    const auto unfit = [&] { (void)group.broadcast(floats({1}), 0, {}, "one_shot"); };
    EXPECT_THAT(thrown_by<InvalidArgument>(differ), HasSubstr("by algorithm \"ring\""));
    EXPECT_THAT(thrown_by<InvalidArgument>(unfit), HasSubstr("it can take direct, ring"));
  });
}

TEST_F(TypedGroups, FailAtEveryRankWhenOneAgentLeaves) {
  std::latch waiting(size - 1);
  run([&](std::size_t rank, Group& group) {
    if (rank == 2) {
      waiting.wait();
      agents[2]->leave();
      EXPECT_THROW(group.barrier().get(), AgentClosed);
      return;
    }
    auto future = group.all_reduce(floats({1}));
    waiting.count_down();
    EXPECT_THAT(thrown_by<Error>([&] { future.get(); }), HasSubstr("rank2"));
  });
}

TEST_F(TypedGroups, FailAtEveryRankWhenOneAborts) {
  run([](std::size_t rank, Group& group) {
    if (rank == 0) group.abort("no more data");
    EXPECT_THAT(thrown_by<Cancelled>([&] { group.barrier().get(); }), HasSubstr("no more data"));
  });
}

TEST_F(TypedGroups, TellHowFarTheyAreAndWhatTheyChoose) {
  run([](std::size_t, Group& group) {
    EXPECT_EQ(group.progress(), (std::pair<std::uint64_t, std::uint64_t>(0, 0)));
    group.barrier().get();
    group.barrier().get();
    EXPECT_EQ(group.progress(), (std::pair<std::uint64_t, std::uint64_t>(2, 2)));
    EXPECT_THAT(group.explain("all_reduce", 64), HasSubstr("one_shot"));
    group.monitored_barrier(patience);
  });
  EXPECT_THAT(thrown_by<DeadlineExceeded>([&] { groups[0]->monitored_barrier(20ms, true); }), HasSubstr("1, 2"));
}

}  // namespace
