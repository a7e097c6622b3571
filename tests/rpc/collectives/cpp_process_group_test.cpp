/// Process groups and data-parallel training of C++ programs (tensorferry/c10d.h), with a rank for each thread.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <future>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "tensorferry/c10d.h"
#include "tensorferry/errors.h"

namespace tensorferry::testing {
namespace {

constexpr int ranks = 2;

/// Runs `body(group, rank)` as each rank of one process group.
template <class Body>
void as_ranks(Body body, const ProcessGroupOptions& options = {}) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<void>> running;
  for (int rank = 0; rank < ranks; ++rank) {
    running.push_back(std::async(std::launch::async, [=] {
      auto group = make_process_group(store, rank, ranks, options);
      body(group, rank);
      group->shutdown();
    }));
  }
  for (auto& one : running) one.get();
}

std::shared_ptr<Agent> join(const std::shared_ptr<Store>& meeting, int rank) {
  AgentOptions options;
  options.name = "agent" + std::to_string(rank);
  options.store = meeting;
  return Agent::join(std::move(options));
}

std::vector<at::Tensor> parameters_of(int rank) {
  std::vector<at::Tensor> out{at::full({3, 2}, rank, at::kFloat), at::full({5}, rank + 10, at::kFloat)};
  for (auto& one : out) one.requires_grad_(true).mutable_grad() = at::full_like(one, rank + 1);
  return out;
}

TEST(CppProcessGroup, RunsTheOperationsOfC10d) {
  as_ranks([](const ProcessGroupPointer& group, int rank) {
    EXPECT_EQ(group->getBackendName(), "tensorferry");
    std::vector<at::Tensor> tensors{at::full({4}, rank + 1.0)};
    group->allreduce(tensors, {})->wait();
    EXPECT_TRUE(at::equal(tensors[0], at::full({4}, 3.0)));
  });
}

TEST(CppProcessGroup, AnAbortedReceiveEndsAloneAndTheGroupGoesOn) {
  as_ranks([](const ProcessGroupPointer& group, int rank) {
    std::vector<at::Tensor> tensors{at::full({4}, rank + 1.0)};
    if (rank == 0) {
      std::vector<at::Tensor> into{at::zeros({4})};
      const auto work = group->recv(into, 1, 5);
      auto waiting = std::async(std::launch::async, [&] { EXPECT_THROW(work->wait(), c10::DistBackendError); });
      work->abort();
      waiting.get();
      EXPECT_FALSE(work->isSuccess());
      EXPECT_THROW(group->allreduce(tensors, {})->abort(), c10::Error) << "it is the others' too";
    } else {
      group->allreduce(tensors, {})->wait();
    }
    group->allreduce(tensors, {})->wait();
    EXPECT_TRUE(at::equal(tensors[0], at::full({4}, 6.0)));
  });
}

#ifdef C10D_BACKEND_HAS_WINDOW
TEST(CppProcessGroup, PutsThroughWindows) {
  as_ranks([](const ProcessGroupPointer& group, int rank) {
    const auto tensor = at::zeros({4});
    const auto window = group->new_window(tensor);
    window->put(at::full({2}, rank + 1.0), 1 - rank, 2, false);
    window->signal(1 - rank, false);
    window->wait_signal(1 - rank, false);
    EXPECT_TRUE(
        at::equal(tensor, at::tensor({0.0F, 0.0F, 2.0F - static_cast<float>(rank), 2.0F - static_cast<float>(rank)})));
    window->tensor_deregister();
  });
}
#endif

TEST(CppProcessGroup, FormsLazilyAtTheFirstOperation) {
  ProcessGroupOptions options;
  options.lazy = true;
  as_ranks([](const ProcessGroupPointer& group, int /*rank*/) { group->barrier({})->wait(); }, options);
}

TEST(CppProcessGroup, SharesTheAgentOfTheProgram) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto meeting = local_store();
  std::vector<std::future<int>> running;
  for (int rank = 0; rank < ranks; ++rank) {
    running.push_back(std::async(std::launch::async, [=] {
      const auto agent = join(meeting, rank);
      agent->serve("rank", [rank] { return rank; });
      auto group = make_process_group(agent, store, rank, ranks);
      group->barrier({})->wait();
      const auto other = agent->call<int>("agent" + std::to_string(1 - rank), "rank").get();
      group->barrier({})->wait();
      group->shutdown();
      return other;
    }));
  }
  EXPECT_EQ(running[0].get(), 1);
  EXPECT_EQ(running[1].get(), 0);
}

TEST(CppProcessGroup, FormsOfAgentsByTheirNames) {
  const auto meeting = local_store();
  std::vector<std::future<void>> running;
  for (int rank = 0; rank < ranks; ++rank) {
    running.push_back(std::async(std::launch::async, [=] {
      const auto agent = join(meeting, rank);
      EXPECT_THROW(make_process_group(agent, {"another"}), InvalidArgument);
      auto group = make_process_group(agent, {"agent0", "agent1"});
      EXPECT_EQ(group->getRank(), rank);
      std::vector<at::Tensor> tensors{at::full({4}, rank + 1.0)};
      group->allreduce(tensors, {})->wait();
      EXPECT_TRUE(at::equal(tensors[0], at::full({4}, 3.0)));
      group->shutdown();
    }));
  }
  for (auto& one : running) one.get();
}

TEST(CppProcessGroup, TrainsWithBroadcastsAndHooks) {
  as_ranks([](const ProcessGroupPointer& group, int rank) {
    const auto parameters = parameters_of(rank);
    std::vector<at::Tensor> values;
    for (const auto& one : parameters) values.push_back(one.detach());
    broadcast_coalesced(group, values, 1);
    EXPECT_TRUE(at::equal(values[0], at::full({3, 2}, 1.0)));
    EXPECT_TRUE(at::equal(values[1], at::full({5}, 11.0)));
    reduce_gradients(parameters, *all_reduce_hook(group));
    EXPECT_TRUE(at::equal(parameters[0].grad(), at::full({3, 2}, 1.5)));
    reduce_gradients(parameters, *compress_hook(group, at::kBFloat16));
    EXPECT_TRUE(at::equal(parameters[1].grad(), at::full({5}, 1.5)));
    CommHook<double> scaled("scaled", 2.0, [](double& by, GradBucket& bucket) {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(bucket.getBuffer() * by);
      return future;
    });
    reduce_gradients(parameters, scaled);
    EXPECT_TRUE(at::equal(parameters[1].grad(), at::full({5}, 3.0)));
  });
}

TEST(CppProcessGroup, AHookThatReturnsSeveralTensorsIsNamedWhereTorchTakesTheFirst) {
  const std::vector<at::Tensor> several{at::zeros({11}), at::ones({11})};
  EXPECT_TRUE(c10d::detail::parseCppCommHookResult(several).is_same(several[0]));
  CommHook<int> hook("several", 0, [&](int&, GradBucket&) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(several);
    return future;
  });
  try {
    reduce_gradients(parameters_of(0), hook);
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("\"several\" failed at bucket 0"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("list of 2 tensors"), std::string::npos) << error.what();
  }
}

TEST(CppProcessGroup, NamesWhatMakesNoSense) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto text_of = [](auto run) -> std::string {
    try {
      run();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(text_of([&] { make_process_group(store, 2, 2); }).find("2 ranks has no rank 2"), std::string::npos);
  ProcessGroupOptions options;
  options.algorithms = "all_reduce=magic";
  EXPECT_NE(text_of([&] { make_process_group(store, 0, 1, options); }).find("magic"), std::string::npos);
  EXPECT_NE(text_of([&] { all_reduce_hook(ProcessGroupPointer()); }).find("make_process_group"), std::string::npos);
}

}  // namespace
}  // namespace tensorferry::testing
