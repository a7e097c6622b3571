#include "rpc/collectives/torch/data_parallel.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/rpc/collectives/world.h"

namespace tensorferry::testing {
namespace {

using collectives::DeviceGroup;
using collectives::GroupError;
using Tensors = std::vector<at::Tensor>;
using Indices = std::vector<std::vector<std::size_t>>;

GradFuture new_future() { return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get()); }

GradFuture completed(const at::Tensor& tensor) {
  auto future = new_future();
  future->markCompleted(tensor);
  return future;
}

/// Parameters of several shapes, one of them strided, with gradients of `value`.
Tensors parameters_with(double value) {
  Tensors out{at::zeros({3, 4}), at::zeros({7}), at::zeros({5, 2}).t(), at::zeros({1})};
  for (auto& parameter : out) {
    parameter.requires_grad_();
    parameter.mutable_grad() = at::full(parameter.sizes(), value);
  }
  return out;
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const GroupError& error) {
    return error.status().text();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

struct Groups3 : ::testing::Test {
  Groups3() {
    world.form(GroupWorld::settings_of({}));
    for (const auto& group : world.groups) tensors.push_back(std::make_shared<DeviceGroup>(group));
  }
  /// Runs `body` for each rank at once.
  void at_each(const std::function<void(std::size_t rank, const std::shared_ptr<DeviceGroup>& group)>& body) {
    GroupWorld::on_threads(tensors.size(), [&](std::size_t rank) { body(rank, tensors[rank]); });
  }
  GroupWorld world{3};
  std::vector<std::shared_ptr<DeviceGroup>> tensors;
};

TEST(Buckets, HaveOneDtypeAndAtMostTheBytes) {
  const auto f = [](std::int64_t elements) { return at::empty({elements}); };  // 4 bytes each
  const auto h = [](std::int64_t elements) { return at::empty({elements}, at::kHalf); };
  EXPECT_EQ(buckets_of({}, 16), Indices{});
  EXPECT_EQ(buckets_of({f(2), f(2), f(1), f(9), f(1)}, 16), (Indices{{0, 1}, {2}, {3}, {4}}));
  EXPECT_EQ(buckets_of({f(1), h(4), f(1), h(4), h(1)}, 16), (Indices{{0, 2}, {1, 3}, {4}}));
  EXPECT_EQ(buckets_of({f(0), f(1), f(0)}, 0), (Indices{{0}, {1}, {2}}));
}

TEST_F(Groups3, BroadcastCoalescedCopiesEveryTensorOfTheRoot) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{64}, std::size_t{1} << 20}) {
    at_each([&](std::size_t rank, const auto& group) {
      Tensors given;
      for (std::int64_t i = 0; i < 9; ++i) {
        given.push_back(at::full({i, 3}, static_cast<double>(100 * rank) + static_cast<double>(i)));
        given.push_back(at::full({2, i}, static_cast<std::int64_t>(100 * rank) + i, at::kLong).t());
      }
      const auto status = broadcast_coalesced(*group, given, 1, bytes);
      EXPECT_TRUE(status.ok()) << status.text();
      for (std::size_t i = 0; i < given.size(); ++i) {
        EXPECT_TRUE(given[i].eq(static_cast<std::int64_t>(100 + i / 2)).all().item<bool>()) << i;
      }
    });
  }
}

TEST_F(Groups3, BroadcastCoalescedRefusesAndNamesTheTensor) {
  const auto sparse = at::zeros({3}).to_sparse();
  const auto status = broadcast_coalesced(*tensors[0], {at::zeros({2}), sparse}, 0, 64);
  EXPECT_EQ(status.text(), "InvalidArgument: tensor 1 of 2: a group takes dense tensors: this one is sparse");
  at_each([&](std::size_t rank, const auto& group) {  // the ranks differ in the second of three buckets
    const auto n = static_cast<std::int64_t>(rank == 2 ? 6 : 5);
    const auto differs = broadcast_coalesced(*group, {at::zeros({2}), at::zeros({n}), at::zeros({4})}, 0, 4);
    EXPECT_EQ(differs.code(), Code::invalid_argument);
    EXPECT_NE(differs.what().find("rank 2"), std::string_view::npos) << differs.text();
    EXPECT_TRUE(broadcast_coalesced(*group, {at::zeros({2})}, 0, 4).ok()) << "the group goes on";
  });
}

TEST_F(Groups3, HooksAverageGradients) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{50}, std::size_t{1} << 20}) {
    at_each([&](std::size_t rank, const auto& group) {
      for (int kind = 0; kind < 3; ++kind) {
        const auto hook = kind == 0   ? collectives::all_reduce_hook(group)
                          : kind == 1 ? collectives::compress_hook(group, at::kHalf)
                                      : collectives::compress_hook(group, at::kBFloat16);
        const auto parameters = parameters_with(static_cast<double>(rank) + 0.5);
        reduce_gradients(parameters, *hook, bytes);
        for (const auto& parameter : parameters) {
          EXPECT_TRUE(parameter.grad().eq(1.5).all().item<bool>()) << kind << parameter.grad();
        }
      }
    });
  }
}

TEST_F(Groups3, AParameterWithoutAGradientCountsAsZerosAndAFrozenOneIsLeftOut) {
  at_each([&](std::size_t rank, const auto& group) {
    auto parameters = parameters_with(3);
    if (rank == 0) parameters[1].mutable_grad() = at::Tensor();
    parameters.push_back(at::zeros({4}));
    reduce_gradients(parameters, *collectives::all_reduce_hook(group));
    EXPECT_TRUE(parameters[0].grad().eq(3).all().item<bool>());
    EXPECT_TRUE(parameters[1].grad().eq(2).all().item<bool>());
    EXPECT_FALSE(parameters[4].grad().defined());
  });
}

TEST_F(Groups3, AnErrorOfTheGroupKeepsItsCodeAndNamesHookAndBucket) {
  at_each([&](std::size_t rank, const auto& group) {
    auto parameters = parameters_with(1);
    if (rank == 1) parameters[1] = at::zeros({8}).requires_grad_();
    const auto hook = collectives::compress_hook(group, at::kHalf);
    const auto text = error_of([&] { reduce_gradients(parameters, *hook, 4); });
    EXPECT_EQ(text.rfind("InvalidArgument: the hook \"half\" failed at bucket 1: ", 0), 0u) << text;
    EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
  });
}

TEST(CommHooks, GetTheBucketAndAStateOfTheirOwn) {
  const auto parameters = parameters_with(2);
  std::vector<std::size_t> seen;
  CommHook<std::vector<std::size_t>*> hook("doubles", &seen, [&](std::vector<std::size_t>* state, GradBucket& bucket) {
    state->push_back(bucket.getIndex());
    EXPECT_EQ(bucket.isLast(), bucket.getIndex() == 2);
    EXPECT_EQ(bucket.getBuffer().dim(), 1);
    const auto gradients = bucket.getGradients();
    EXPECT_EQ(gradients.size(), bucket.getParameters().size());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_EQ(gradients[i].sizes(), bucket.getParameters()[i].sizes());
      EXPECT_TRUE(gradients[i].is_alias_of(bucket.getBuffer()));
    }
    return completed(bucket.getBuffer() * 2);
  });
  reduce_gradients(parameters, hook, 48);  // 12 elements; 7; 10, and 1 that still fits
  EXPECT_EQ(seen, (std::vector<std::size_t>{0, 1, 2}));
  for (const auto& parameter : parameters) EXPECT_TRUE(parameter.grad().eq(4).all().item<bool>());
}

TEST(CommHooks, TwoBucketsAreInFlight) {
  struct Flights {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t now = 0, most = 0, begun = 0;
    std::vector<std::thread> threads;
  };
  constexpr std::size_t buckets = 6;
  Flights flights;
  CommHook<Flights*> hook("slow", &flights, [](Flights* state, GradBucket& bucket) {
    const std::lock_guard lock(state->mutex);
    state->most = std::max(state->most, ++state->now);
    const auto number = ++state->begun;
    state->changed.notify_all();
    auto future = new_future();
    state->threads.emplace_back([state, future, number, buffer = bucket.getBuffer()] {
      {
        std::unique_lock guard(state->mutex);
        const auto next_has_begun = [&] { return state->begun > number || number == buckets; };
        EXPECT_TRUE(state->changed.wait_for(guard, std::chrono::seconds(60), next_has_begun));
        const auto another = state->begun + 1;
        state->changed.wait_for(guard, std::chrono::milliseconds(20), [&] { return state->begun == another; });
        --state->now;
      }
      future->markCompleted(buffer);
    });
    return future;
  });
  Tensors parameters;
  for (std::size_t i = 0; i < buckets; ++i) parameters.push_back(at::zeros({4}).requires_grad_());
  reduce_gradients(parameters, hook, 16);
  for (auto& thread : flights.threads) thread.join();
  EXPECT_EQ(flights.threads.size(), buckets);
  EXPECT_EQ(flights.most, 2u);
}

TEST(CommHooks, ErrorsNameHookAndBucketAndNothingIsInFlightAfterwards) {
  auto first = new_future();
  const auto parameters = parameters_with(1);
  CommHook<int> hook("fragile", 0, [&](int&, GradBucket& bucket) -> GradFuture {
    if (bucket.getIndex() == 0) return first;
    throw std::runtime_error("no more");
  });
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    first->markCompleted(at::zeros({12}));
  });
  EXPECT_EQ(error_of([&] { reduce_gradients(parameters, hook, 4); }),
            "the hook \"fragile\" failed at bucket 1: no more");
  EXPECT_TRUE(first->completed());
  later.join();

  const auto text_with = [&](const std::function<GradFuture(GradBucket&)>& run) {
    CommHook<int> other("odd", 0, [&](int&, GradBucket& bucket) { return run(bucket); });
    return error_of([&] { reduce_gradients(parameters_with(1), other); });
  };
  EXPECT_EQ(text_with([](GradBucket&) { return GradFuture(); }),
            "the hook \"odd\" failed at bucket 0: it returned no future");
  EXPECT_EQ(text_with([](GradBucket&) {
              auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
              future->markCompleted(Tensors{at::ones({1}), at::ones({2})});
              return future;
            }),
            "the hook \"odd\" failed at bucket 0: its result is a list of 2 tensors; return a future of one tensor");
  EXPECT_EQ(text_with([](GradBucket&) {
              auto future = new_future();
              future->setError(std::make_exception_ptr(std::logic_error("broken")));
              return future;
            }),
            "the hook \"odd\" failed at bucket 0: broken");
  EXPECT_EQ(text_with([](GradBucket&) { return completed(at::ones({29})); }),
            "the hook \"odd\" failed at bucket 0: its result has 29 elements, and the bucket has 30; return as many");
}

TEST(CommHooks, AListOfOneTensorIsAResult) {
  CommHook<int> hook("list", 0, [](int&, GradBucket& bucket) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future->markCompleted(Tensors{bucket.getBuffer() + 1});
    return future;
  });
  const auto parameters = parameters_with(1);
  reduce_gradients(parameters, hook);
  EXPECT_TRUE(parameters[2].grad().eq(2).all().item<bool>());
}

TEST(CommHooks, AnInterruptionEndsTheWait) {
  CommHook<int> hook("never", 0, [](int&, GradBucket&) { return new_future(); });
  const auto text = error_of([&] { reduce_gradients(parameters_with(1), hook, 4, [] { return true; }); });
  EXPECT_EQ(text, "Cancelled: the reduction of gradients was interrupted");
}

}  // namespace
}  // namespace tensorferry::testing
