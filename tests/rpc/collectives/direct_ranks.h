/// Ranks of one process that operate on memory of GPUs: rank r is on GPU r % devices(). And the elements with which the
/// tests do so.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "channels/cuda/device.h"
#include "channels/cuda/event_poller.h"
#include "rpc/collectives/cuda/direct_group.h"
#include "rpc/collectives/cuda/watch.h"
#include "rpc/collectives/reduce.h"
#include "tests/agent/patience.h"
#include "tests/rpc/collectives/gpu.h"
#include "tests/rpc/collectives/world.h"

namespace tensorferry::testing {

class Direct : public ::testing::Test {
 public:
  /// A rank in run().
  struct Rank {
    std::size_t rank;
    collectives::RawGroup& group;
    collectives::cuda::DirectGroup& direct;
    Gpu& gpu;
    std::shared_ptr<collectives::cuda::DeviceRun> run = nullptr;  // of the last operation
    collectives::StartOptions options() {
      run = direct.run_on(gpu.device, gpu.stream);
      collectives::StartOptions out;
      out.background = false;
      out.device = run;
      return out;
    }
  };

 protected:
  void SetUp() override {
    const auto missing = conformance::why_no_cuda(1);
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
  /// `algorithm`: "one_shot" and "two_shot" are prescribed; for "by_one" all ranks have one GPU.
  void form(std::size_t ranks, std::chrono::milliseconds timeout = std::chrono::seconds(under_sanitizer ? 150 : 40),
            const std::string& algorithm = "") {
    world = std::make_unique<GroupWorld>(ranks);
    auto settings = GroupWorld::settings_of({ranks});
    settings.timeout = timeout;
    const bool together = algorithm == "by_one";
    if (!algorithm.empty() && !together) settings.algorithms = "all_reduce=" + algorithm + ",reduce=" + algorithm;
    world->form(settings);
    directs.clear();
    free_what_was_dropped();
    for (const auto& group : world->groups)
      directs.push_back(
          collectives::cuda::DirectGroup::of(group, collectives::cuda::DirectGroup::Threads::may_share_a_gpu));
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      gpus.push_back(std::make_unique<Gpu>(together ? 0 : static_cast<int>(rank) % cuda::devices(), gpu_bytes));
    }
  }
  /// Waits until the memory of an earlier group is freed. The driver frees it when all GPUs are idle, and launches
  /// nothing meanwhile: a kernel that waits for another rank of this process would wait for ever.
  static void free_what_was_dropped() {
    const auto await = [](Background& thread, Clock::time_point at) {
      std::promise<void> done;
      thread.submit([&] { done.set_value(); }, at);
      done.get_future().wait();
    };
    // Behind the last look at the group, which may be what drops the memory, and then behind the jobs that free it.
    await(collectives::cuda::watcher(), Clock().now() + 2 * collectives::cuda::DeviceWatch::period);
    await(cuda::background(), Clock::time_point::min());
  }
  /// Runs `body` at all ranks at once. All are direct.
  void run(const std::function<void(Rank&)>& body) {
    world->run([&](std::size_t rank, collectives::RawGroup& group) {
      auto& gpu = *gpus[rank];
      const auto staged = directs[rank]->prepare(gpu.device, {});
      ASSERT_TRUE(staged.ok()) << staged.status().text();
      ASSERT_EQ(*staged, "");
      Rank each{rank, group, *directs[rank], gpu};
      body(each);
      directs[rank]->drain();
    });
  }
  void TearDown() override {
    gpus.clear();
    directs.clear();
    world.reset();
  }

  std::unique_ptr<GroupWorld> world;
  std::vector<std::shared_ptr<collectives::cuda::DirectGroup>> directs;
  std::vector<std::unique_ptr<Gpu>> gpus;
  static constexpr std::size_t gpu_bytes = std::size_t{80} << 20;
};

/// Elements below 2 in magnitude, which are no NaN: GPUs and processors may give NaNs other payloads.
/// Those of a long tensor repeat: sanitizers take seconds for a loop over megabytes.
inline Bytes elements_of(DType dtype, std::size_t count, std::size_t seed) {
  constexpr std::size_t period = 4099;  // elements
  Bytes out(std::min(count, period) * size_of(dtype));
  std::uint64_t state = seed * 7919 + 1;
  for (auto& each : out) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    each = static_cast<std::byte>(state >> 56U);
  }
  const auto clear = [&](std::size_t every, std::byte kept) {
    for (std::size_t i = every - 1; i < out.size(); i += every) out[i] &= kept;
  };
  switch (dtype) {
    case DType::boolean:
      clear(1, std::byte{1});
      break;
    case DType::float8_e5m2:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2fnuz:
    case DType::float8_e4m3fnuz:
      clear(1, std::byte{0x3f});
      break;
    case DType::float16:
    case DType::bfloat16:
    case DType::complex32:
      clear(2, std::byte{0xbf});
      break;
    case DType::float32:
    case DType::complex64:
      clear(4, std::byte{0xbf});
      break;
    case DType::float64:
    case DType::complex128:
      clear(8, std::byte{0xbf});
      break;
    default:
      break;
  }
  const auto block = out.size();
  out.resize(count * size_of(dtype));
  for (std::size_t at = block; at < out.size(); at += block) {
    std::memcpy(out.data() + at, out.data(), std::min(block, out.size() - at));
  }
  return out;
}

inline Bytes reduced(const std::vector<Bytes>& inputs, DType dtype, const ReduceOp& op) {
  std::vector<const std::byte*> pointers;
  for (const auto& each : inputs) pointers.push_back(each.data());
  Bytes out(inputs[0].size());
  collectives::reduce(op, dtype, pointers, out.data(), out.size() / size_of(dtype));
  return out;
}

inline std::vector<Bytes> inputs_of(std::size_t ranks, DType dtype, std::size_t count) {
  std::vector<Bytes> out;
  for (std::size_t rank = 0; rank < ranks; ++rank) out.push_back(elements_of(dtype, count, rank + count));
  return out;
}

/// Reduces floats of several sizes, to all ranks and to one, and compares the bits with those that the host gives.
inline void reduce_all_sizes(Direct::Rank& each, const std::vector<std::size_t>& counts) {
  const auto all = each.group.size();
  for (const std::size_t count : counts) {
    const auto inputs = inputs_of(all, DType::float32, count);
    const auto expected = reduced(inputs, DType::float32, Reduction::average);
    const auto offset = (each.rank + count) % 4 * 4;
    const auto in = each.gpu.put(inputs[each.rank], offset);
    const auto out = each.gpu.allocate(in.size(), 12 - offset);
    ASSERT_TRUE(ended(each.group.all_reduce(in, out, DType::float32, Reduction::average, each.options())).ok());
    EXPECT_EQ(each.gpu.get(out), expected) << count;
    EXPECT_EQ(each.gpu.get(in), inputs[each.rank]) << count;
    const auto root = count % all;
    ASSERT_TRUE(ended(each.group.reduce(in, in, DType::float32, Reduction::average, root, each.options())).ok());
    EXPECT_EQ(each.gpu.get(in), each.rank == root ? expected : inputs[each.rank]) << count;
    each.gpu.forget();
  }
}

/// Captures reductions of so many elements, and replays them `turns` times, after every other time with the same
/// operations outside of the graph.
inline void replay_between_others(Direct::Rank& each, const std::vector<std::size_t>& counts, std::int32_t turns) {
  const auto all = each.group.size();
  std::vector<std::span<std::byte>> values;
  for (const auto count : counts) values.push_back(each.gpu.allocate(4 * count));
  const auto reduce_all = [&] {
    for (const auto& one : values) {
      const auto status = ended(each.group.all_reduce(one, one, DType::int32, Reduction::sum, each.options()));
      ASSERT_TRUE(status.ok()) << status.text();
      EXPECT_TRUE(each.run->status().ok());
    }
  };
  CapturedGraph graph(each.gpu, reduce_all);
  EXPECT_TRUE(each.run->ended());
  for (std::int32_t turn = 1; turn <= turns; ++turn) {
    for (const auto& one : values) {
      const std::vector<std::int32_t> given(one.size() / 4, turn + static_cast<std::int32_t>(each.rank));
      each.gpu.copy(one.data(), std::as_bytes(std::span(given)));
      each.gpu.synchronize();
    }
    graph.launch();
    std::int32_t expected = 0;
    for (std::size_t rank = 0; rank < all; ++rank) expected += turn + static_cast<std::int32_t>(rank);
    if (turn % 2 == 0) {  // operations outside of the graph, between its launches
      reduce_all();
      expected *= static_cast<std::int32_t>(all);
    }
    for (const auto& one : values) {
      const auto out = each.gpu.get(one);
      const std::vector<std::int32_t> wanted(out.size() / 4, expected);
      EXPECT_EQ(std::memcmp(out.data(), wanted.data(), out.size()), 0) << turn << ", " << out.size();
    }
  }
  // All ranks are done with the graph before one leaves.
  ASSERT_TRUE(ended(each.group.barrier()).ok());
}

inline constexpr std::array dtypes{
    DType::boolean,         DType::uint8,           DType::int8,      DType::uint16,      DType::int16,
    DType::uint32,          DType::int32,           DType::uint64,    DType::int64,       DType::float16,
    DType::bfloat16,        DType::float32,         DType::float64,   DType::float8_e5m2, DType::float8_e4m3fn,
    DType::float8_e5m2fnuz, DType::float8_e4m3fnuz, DType::complex32, DType::complex64,   DType::complex128};

}  // namespace tensorferry::testing
