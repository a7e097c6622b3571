// Operations of a group on memory of GPUs, without the host. Rank r is on GPU r % devices().
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "channels/cuda/device.h"
#include "channels/cuda/invalidate.h"
#include "channels/cuda/pinned.h"
#include "rpc/collectives/cuda/direct_group.h"
#include "rpc/collectives/cuda/reductions.h"
#include "rpc/collectives/cuda/symmetric_memory.h"
#include "rpc/collectives/reduce.h"
#include "tests/rpc/collectives/direct_ranks.h"

namespace tensorferry::testing {
namespace {

using collectives::RawGroup;
using collectives::StartOptions;
using collectives::cuda::DirectGroup;
using cuda::api;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

struct Reductions {
  std::size_t ranks;
  std::string algorithm;
};
class DirectReductions : public Direct, public ::testing::WithParamInterface<Reductions> {};

TEST_P(DirectReductions, OfEveryDtypeGiveTheBitsThatTheHostGives) {
  const auto ranks = GetParam().ranks;
  form(ranks, std::chrono::seconds(40), GetParam().algorithm);
  run([&](Rank& each) {
    for (const auto dtype : dtypes) {
      for (int kind = 0; kind < static_cast<int>(Reduction::custom); ++kind) {
        ReduceOp op(static_cast<Reduction>(kind));
        if (op.kind == Reduction::premultiplied_sum) op.factor = 0.375;
        if (!collectives::check_reduction(op, dtype).ok()) continue;
        for (const std::size_t count : {1, 37, 4099}) {
          const auto inputs = inputs_of(ranks, dtype, count);
          // The input and the output begin one element behind a multiple of 16 bytes at some ranks.
          const auto offset = each.rank % 2 * size_of(dtype);
          const auto in = each.gpu.put(inputs[each.rank], offset);
          const auto out = each.gpu.allocate(in.size(), size_of(dtype) - offset);
          ASSERT_TRUE(ended(each.group.all_reduce(in, out, dtype, op, each.options())).ok());
          EXPECT_EQ(each.gpu.get(out), reduced(inputs, dtype, op))
              << name_of(dtype) << " " << name_of(op.kind) << " of " << count;
          each.gpu.forget();
        }
      }
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Ranks, DirectReductions,
                         ::testing::Values(Reductions{1, "one_shot"}, Reductions{2, "one_shot"},
                                           Reductions{2, "two_shot"}, Reductions{2, "by_one"},
                                           Reductions{4, "one_shot"}, Reductions{4, "two_shot"},
                                           Reductions{4, "by_one"}),
                         [](const auto& each) {
                           return std::to_string(each.param.ranks) + "_" + each.param.algorithm;
                         });

class DirectLarge : public Direct, public ::testing::WithParamInterface<std::string> {};

TEST_P(DirectLarge, TensorsAreReducedInPlaceInSeveralChunks) {
  constexpr std::size_t count = (std::size_t{70} << 20) / 4 + 3;
  form(2, std::chrono::seconds(40), GetParam());
  std::vector<float> first(count), second(count), sum(count);
  for (std::size_t i = 0; i < count; ++i) {
    first[i] = static_cast<float>(i % 1001);
    second[i] = static_cast<float>(i % 77) / 4;
    sum[i] = first[i] + second[i];
  }
  run([&](Rank& each) {
    const auto values = each.gpu.put(std::as_bytes(std::span(each.rank == 0 ? first : second)));
    ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::float32, Reduction::sum, each.options())).ok());
    const auto out = each.gpu.get(values);
    EXPECT_EQ(std::memcmp(out.data(), sum.data(), out.size()), 0);
    EXPECT_TRUE(each.run->ended());
    EXPECT_TRUE(each.run->status().ok());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DirectLarge, ::testing::Values("one_shot", "two_shot", "by_one"),
                         [](const auto& each) { return each.param; });

TEST_F(Direct, ManyOperationsOnStreamsInTurnFollowOneAnother) {
  if (!is_emulated() && cuda::devices() < 3) GTEST_SKIP() << "the streams of ranks that share a GPU share queues here";
  form(3);
  run([&](Rank& each) {
    Gpu other(each.gpu.device);
    const std::vector<std::int32_t> ones(5000, 1);
    const auto values = each.gpu.put(std::as_bytes(std::span(ones)));
    each.gpu.synchronize();
    for (int i = 0; i < 8; ++i) {
      StartOptions options;
      options.background = false;
      options.device = each.direct.run_on(each.gpu.device, i % 3 == 0 ? other.stream : each.gpu.stream);
      const auto work = each.group.all_reduce(values, values, DType::int32, Reduction::sum, std::move(options));
      ASSERT_TRUE(ended(work).ok());
    }
    const auto out = each.gpu.get(values);
    std::int32_t last = 0;
    std::memcpy(&last, out.data() + out.size() - sizeof last, sizeof last);
    EXPECT_EQ(last, 6561);  // 3 to the 8th
  });
}

/// Runs each operation that is no all_reduce on pieces of `count` elements, and compares what each rank gets.
void run_every_operation(Direct::Rank& each, std::size_t count) {
  const auto rank = each.rank, ranks = each.group.size();
  const auto inputs = inputs_of(ranks, DType::int32, count);
  const auto mine = each.gpu.put(inputs[rank], rank % 2 * 4);
  const auto root = ranks - 1;

  auto data = each.gpu.put(inputs[rank]);
  ASSERT_TRUE(ended(each.group.broadcast(data, DType::int32, root, each.options())).ok());
  EXPECT_EQ(each.gpu.get(data), inputs[root]);

  data = each.gpu.allocate(mine.size());
  ASSERT_TRUE(ended(each.group.reduce(mine, data, DType::int32, Reduction::max, root, each.options())).ok());
  if (rank == root) {
    EXPECT_EQ(each.gpu.get(data), reduced(inputs, DType::int32, Reduction::max));
  }

  std::vector<std::span<std::byte>> outputs;
  for (std::size_t from = 0; from < ranks; ++from) outputs.push_back(each.gpu.allocate(mine.size(), 4));
  ASSERT_TRUE(ended(each.group.all_gather(mine, outputs, DType::int32, true, each.options())).ok());
  for (std::size_t from = 0; from < ranks; ++from) EXPECT_EQ(each.gpu.get(outputs[from]), inputs[from]);

  // In place: the input is the rank's own output.
  ASSERT_TRUE(ended(each.group.all_gather(outputs[rank], outputs, DType::int32, true, each.options())).ok());
  for (std::size_t from = 0; from < ranks; ++from) EXPECT_EQ(each.gpu.get(outputs[from]), inputs[from]);

  for (auto& output : outputs) output = each.gpu.allocate(mine.size());
  const auto taken = rank == root ? outputs : std::vector<std::span<std::byte>>();
  ASSERT_TRUE(ended(each.group.gather(mine, taken, DType::int32, root, each.options())).ok());
  for (std::size_t from = 0; rank == root && from < ranks; ++from) {
    EXPECT_EQ(each.gpu.get(outputs[from]), inputs[from]);
  }

  // The input for rank `to` at rank `from`.
  const auto between = [&](std::size_t from, std::size_t to) {
    return elements_of(DType::int32, count, 100 * from + to);
  };
  std::vector<std::span<const std::byte>> given;
  std::vector<Bytes> all;
  for (std::size_t to = 0; to < ranks; ++to) given.emplace_back(each.gpu.put(between(rank, to), to % 2 * 4));
  for (std::size_t from = 0; from < ranks; ++from) all.push_back(between(from, rank));
  ASSERT_TRUE(ended(each.group.reduce_scatter(given, data, DType::int32, Reduction::sum, each.options())).ok());
  EXPECT_EQ(each.gpu.get(data), reduced(all, DType::int32, Reduction::sum));

  ASSERT_TRUE(ended(each.group.scatter(rank == root ? given : std::vector<std::span<const std::byte>>(), data,
                                       DType::int32, root, each.options()))
                  .ok());
  EXPECT_EQ(each.gpu.get(data), between(root, rank));

  for (const bool even : {true, false}) {
    for (auto& output : outputs) output = each.gpu.allocate(mine.size());
    ASSERT_TRUE(ended(each.group.all_to_all(given, outputs, DType::int32, even, each.options())).ok());
    for (std::size_t from = 0; from < ranks; ++from) EXPECT_EQ(each.gpu.get(outputs[from]), between(from, rank));
  }
  each.gpu.forget();
}

/// Reduces pieces of unit * (rank + 1) elements, so that each rank gets another number of them.
void reduce_and_scatter_unevenly(Direct::Rank& each, std::size_t unit) {
  const auto all = each.group.size();
  const auto between = [&](std::size_t from, std::size_t to) {
    return elements_of(DType::int32, unit * (to + 1), 100 * from + to);
  };
  std::vector<std::span<const std::byte>> given;
  std::vector<Bytes> mine;
  for (std::size_t to = 0; to < all; ++to) given.emplace_back(each.gpu.put(between(each.rank, to)));
  for (std::size_t from = 0; from < all; ++from) mine.push_back(between(from, each.rank));
  const auto out = each.gpu.allocate(mine[0].size());
  const auto status = ended(each.group.reduce_scatter(given, out, DType::int32, Reduction::sum, each.options()));
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_EQ(each.gpu.get(out), reduced(mine, DType::int32, Reduction::sum)) << unit;
  each.gpu.forget();
}

class DirectOperations : public Direct, public ::testing::WithParamInterface<std::size_t> {};

TEST_P(DirectOperations, GiveEachRankWhatTheOperationPromises) {
  const auto ranks = GetParam();
  form(ranks);
  run([&](Rank& each) {
    for (const std::size_t count : {0, 5, 3001}) run_every_operation(each, count);
    // Of another size at each rank.
    std::vector<std::span<std::byte>> outputs;
    for (std::size_t from = 0; from < ranks; ++from) outputs.push_back(each.gpu.allocate(4 * from));
    const auto input = each.gpu.put(elements_of(DType::int32, each.rank, each.rank));
    ASSERT_TRUE(ended(each.group.all_gather(input, outputs, DType::int32, false, each.options())).ok());
    for (std::size_t from = 0; from < ranks; ++from) {
      EXPECT_EQ(each.gpu.get(outputs[from]), elements_of(DType::int32, from, from));
    }
  });
}

TEST_P(DirectOperations, EachRankGetsItsShareOfPiecesOfDifferentSizes) {
  form(GetParam());
  run([&](Rank& each) {
    // With the last one, the largest pieces go in more chunks than the smallest.
    for (const std::size_t unit : {1, 1001, 2'000'000}) reduce_and_scatter_unevenly(each, unit);
  });
}
INSTANTIATE_TEST_SUITE_P(Ranks, DirectOperations, ::testing::Values(1, 2, 3),
                         [](const auto& each) { return std::to_string(each.param); });

TEST_F(Direct, ExplainNamesTheTopologyAndTheAlgorithmForTheBytes) {
  if (is_emulated()) ::setenv("EMULATED_MACHINE", "hgx-a100-4", 1);
  if (cuda::devices() < 2) GTEST_SKIP() << "one GPU";
  form(2);
  run([&](Rank& each) {
    const auto small = each.group.explain(collectives::Operation::all_reduce, 1000);
    EXPECT_THAT(small,
                HasSubstr("Tensors of GPUs go directly, by streams and kernels: one_shot (two_shot is for more"));
    EXPECT_THAT(small, HasSubstr("each of the 2 ranks has a GPU, joined by "));
    EXPECT_THAT(small, Not(HasSubstr("joined by unknown")));
    EXPECT_THAT(each.group.explain(collectives::Operation::all_reduce, 1 << 20), HasSubstr("kernels: two_shot ("));
    EXPECT_THAT(each.group.explain(collectives::Operation::broadcast, 1 << 20), HasSubstr("kernels: copies ("));
    const auto key = each.group.gpu_tuning_key();
    ASSERT_TRUE(key);
    EXPECT_THAT(small, HasSubstr("joined by " + key->topology));
    EXPECT_EQ(key->ranks, 2);
    EXPECT_NE(key->device, "");
    if (!is_emulated()) return;
    EXPECT_EQ(key->topology, "full mesh");
    EXPECT_THAT(small, HasSubstr("4 or more NVLinks join each two GPUs"));
  });
}

TEST_F(Direct, ACallTakesTheAlgorithmThatItAsksForAndIsCounted) {
  form(2);
  run([&](Rank& each) {
    const auto inputs = inputs_of(2, DType::float32, 1000);
    const auto sum = reduced(inputs, DType::float32, Reduction::sum);
    for (const std::string algorithm : {"one_shot", "two_shot"}) {
      const auto values = each.gpu.put(inputs[each.rank]);
      auto options = each.options();
      options.algorithm = algorithm;
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::float32, Reduction::sum, options)).ok());
      EXPECT_EQ(each.gpu.get(values), sum);
      const auto& paths = each.group.paths();
      EXPECT_TRUE(std::any_of(paths.begin(), paths.end(), [&](const collectives::CountedPath& path) {
        return path.operation == collectives::Operation::all_reduce && path.path == collectives::Path::gpu &&
               path.algorithm == algorithm && path.count == 1;
      })) << algorithm;
    }
    const auto values = each.gpu.put(inputs[each.rank]);
    auto options = each.options();
    options.algorithm = each.rank == 0 ? "one_shot" : "two_shot";
    const auto differ = ended(each.group.all_reduce(values, values, DType::float32, Reduction::sum, options));
    EXPECT_EQ(differ.code(), Code::invalid_argument);
    EXPECT_THAT(std::string(differ.what()), HasSubstr("by algorithm \"two_shot\""));
    options = each.options();
    options.algorithm = "ring";
    const auto unfit = ended(each.group.all_reduce(values, values, DType::float32, Reduction::sum, options));
    EXPECT_EQ(unfit.code(), Code::invalid_argument);
    EXPECT_THAT(std::string(unfit.what()), HasSubstr("it can take one_shot, two_shot"));
  });
}

TEST_F(Direct, AKernelIsCompiledOnceForAllGpusOfAKind) {
  if (!is_emulated()) GTEST_SKIP() << "needs emulated GPUs";
  const auto find = [](int device) {
    using collectives::cuda::FlagKernel;
    return FlagKernel::find(device, DType::int16, Reduction::product, 5, FlagKernel::Kind::two_shot).status();
  };
  EXPECT_TRUE(find(0).ok()) << find(0).text();
  auto* const library = ::dlopen("libnvrtc.so.13", RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(library, nullptr);
  const auto compilations = reinterpret_cast<int (*)()>(::dlsym(library, "emulatedCompilations"));
  ASSERT_NE(compilations, nullptr);
  const auto before = compilations();
  EXPECT_GE(before, 1);
  ASSERT_GE(cuda::devices(), 2);
  for (int device = 0; device < cuda::devices(); ++device) EXPECT_TRUE(find(device).ok()) << find(device).text();
  EXPECT_EQ(compilations(), before);
  EXPECT_FALSE(find(cuda::devices()).ok());
  ::dlclose(library);
}

TEST_F(Direct, CrossingsOfRankZeroAreUsedAtEveryRank) {
  if (cuda::devices() < 2) GTEST_SKIP() << "one GPU";
  form(2);
  std::optional<collectives::TuningKey> key;
  run([&](Rank& each) {
    if (each.rank == 0) key = each.group.gpu_tuning_key();
  });
  ASSERT_TRUE(key);
  const auto path = ::testing::TempDir() + "tensorferry-tuning-" + std::to_string(::getpid()) + ".json";
  std::ofstream(path) << R"({"measured": [{"topology": ")" << key->topology << R"(", "device": ")" << key->device
                      << R"(", "ranks": 2, "version": ")" << key->version
                      << R"(", "crossings": {"all_reduce": "one_shot:4096:two_shot"}}]})";
  ::setenv("TENSORFERRY_TUNING", path.c_str(), 1);
  gpus.clear();
  form(2);
  run([&](Rank& each) {
    for (const std::size_t count : {1024, 1025}) {
      const auto said = each.group.explain(collectives::Operation::all_reduce, 4 * count);
      EXPECT_THAT(said, HasSubstr(count == 1024 ? "kernels: one_shot (" : "kernels: two_shot ("));
      EXPECT_THAT(said, HasSubstr("as measured by `tensorferry tune`"));
      const auto inputs = inputs_of(2, DType::int32, count);
      const auto values = each.gpu.put(inputs[each.rank]);
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::int32, Reduction::sum, each.options())).ok());
      EXPECT_EQ(each.gpu.get(values), reduced(inputs, DType::int32, Reduction::sum));
    }
  });
  ::unsetenv("TENSORFERRY_TUNING");
  std::filesystem::remove(path);
}

// ---- kernels that meet by flags, on GPUs of which each rank has one

class DirectFlags : public Direct {
 protected:
  static void SetUpTestSuite() { ::setenv("EMULATED_GPUS", "4", 1); }
  /// As many ranks as there are GPUs, up to 4.
  std::size_t ranks() { return static_cast<std::size_t>(std::min(cuda::devices(), 4)); }
  void SetUp() override {
    const auto missing = conformance::why_no_cuda(2);
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

TEST_F(DirectFlags, ExplainSaysHowTheRanksMeet) {
  form(ranks());
  run([&](Rank& each) {
    const auto said = [&](std::size_t bytes) { return each.group.explain(collectives::Operation::all_reduce, bytes); };
    EXPECT_THAT(said(1000), HasSubstr(", whose kernels meet by flags"));
    EXPECT_THAT(said(10 << 20), HasSubstr(", whose kernels meet by flags"));
    EXPECT_THAT(said((10 << 20) + 1), HasSubstr(", whose streams meet by words, because kernels meet up to 10485760"));
    EXPECT_EQ(each.direct.why_not_captured(each.gpu.device), "");
    EXPECT_THAT(each.direct.why_not_captured(99), HasSubstr("has had no operation on this GPU yet"));
  });
}

// The default streams of all GPUs have one handle.
TEST_F(DirectFlags, AnOperationOnTheDefaultStreamOfAnotherGpuFollowsTheLastOne) {
  if (cuda::devices() < 4) GTEST_SKIP() << "needs two GPUs for each rank";
  form(2);
  std::atomic<int> enqueued{0}, looked{0};
  run([&](Rank& each) {
    Gpu other(each.gpu.device + 2, 1 << 20);
    const auto staged = each.direct.prepare(other.device, {});
    ASSERT_TRUE(staged.ok() && staged->empty()) << staged.status().text();
    const std::vector<float> ones(10, 1);
    const auto sum_on = [&](Gpu& gpu, std::span<std::byte> values) {
      auto run = each.direct.run_on(gpu.device, nullptr);
      collectives::StartOptions options;
      options.background = false;
      options.device = run;
      EXPECT_TRUE(ended(each.group.all_reduce(values, values, DType::float32, Reduction::sum, options)).ok());
      return run;
    };
    const auto first = each.gpu.put(std::as_bytes(std::span(ones))), second = other.put(std::as_bytes(std::span(ones)));
    each.gpu.synchronize();
    other.synchronize();
    sum_on(each.gpu, first);  // the first operations load kernels, and the driver may wait for the streams then
    sum_on(other, second);
    each.direct.drain();
    const auto page = *cuda::Pinned::lock(*SharedMemory::create(4096), each.gpu.device);
    if (each.rank == 0) {
      const cuda::DeviceGuard here(each.gpu.device);
      ASSERT_EQ(cuda::word_at(page, 0).wait_on(nullptr, 1), CUDA_SUCCESS);
    }
    const auto held = sum_on(each.gpu, first), behind = sum_on(other, second);
    ++enqueued;
    while (enqueued < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_FALSE(held->ended() || behind->ended());
    ++looked;
    while (looked < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    cuda::word_at(page, 0).set(1);
    each.direct.drain();
    EXPECT_TRUE(held->ended() && behind->ended());
    for (const auto& sum : {each.gpu.get(first), other.get(second)}) {
      EXPECT_EQ(*reinterpret_cast<const float*>(sum.data()), 4);
    }
  });
}

TEST_F(DirectFlags, OperationsOfAllSizesAndAlignmentsFollowOneAnother) {
  form(ranks());
  run([&](Rank& each) {
    // Below and above the crossing, and above what kernels meet for, in turns: other numbers of blocks use the halves.
    reduce_all_sizes(each, {1, 80'000, 3, 300'001, 37, 2'900'000, 100, 70'000, 16, 4099, 65'536, 5});
  });
}

TEST_F(DirectFlags, ManyOperationsAreEnqueuedBeforeTheFirstEnds) {
  form(ranks());
  run([&](Rank& each) {
    const std::vector<std::int32_t> ones(100'000, 1);
    const auto values = each.gpu.put(std::as_bytes(std::span(ones)));
    std::int32_t expected = 1;
    for (int i = 0; i < 8; ++i) {
      const auto some = i % 2 == 0 ? values : values.first(4000);  // two_shot and one_shot
      ASSERT_TRUE(ended(each.group.all_reduce(some, some, DType::int32, Reduction::sum, each.options())).ok());
      expected *= static_cast<std::int32_t>(each.group.size());
    }
    const auto out = each.gpu.get(values);
    std::int32_t first = 0, last = 0;
    std::memcpy(&first, out.data(), sizeof first);
    std::memcpy(&last, out.data() + out.size() - sizeof last, sizeof last);
    EXPECT_EQ(first, expected);
    EXPECT_EQ(last, static_cast<std::int32_t>(std::pow(each.group.size(), 4)));
  });
}

TEST_F(DirectFlags, AGraphOfOperationsIsReplayedBetweenOthers) {
  form(ranks());
  run([&](Rank& each) {
    // The last one is larger than kernels meet for otherwise, and than their halves.
    replay_between_others(each, {100, 100'000, 7, 4'300'000}, 5);
  });
}

TEST_F(DirectFlags, PiecesOfAllSizesAreExchanged) {
  form(ranks());
  run([&](Rank& each) {
    // The last one is larger than what kernels meet for.
    for (const std::size_t count : {1, 37, 70'000, 3, 200'003, 750'001}) run_every_operation(each, count);
    const auto all = each.group.size();
    for (const std::size_t unit : {0, 1, 1000, 50'001}) {  // of another size between each two ranks
      const auto count = [&](std::size_t from, std::size_t to) { return unit * ((from + 2 * to) % all); };
      std::vector<std::span<const std::byte>> given;
      std::vector<std::span<std::byte>> taken;
      for (std::size_t to = 0; to < all; ++to) {
        given.emplace_back(each.gpu.put(elements_of(DType::int16, count(each.rank, to), each.rank * all + to), 2));
      }
      for (std::size_t from = 0; from < all; ++from) taken.push_back(each.gpu.allocate(2 * count(from, each.rank)));
      ASSERT_TRUE(ended(each.group.all_to_all(given, taken, DType::int16, false, each.options())).ok());
      for (std::size_t from = 0; from < all; ++from) {
        EXPECT_EQ(each.gpu.get(taken[from]), elements_of(DType::int16, count(from, each.rank), from * all + each.rank));
      }
      each.gpu.forget();
    }
  });
}

TEST_F(DirectFlags, PiecesOfDifferentSizesAreReduced) {
  form(ranks());
  run([&](Rank& each) {
    // With the last one, the largest pieces are more than what kernels meet for, and the smallest are not.
    for (const std::size_t unit : {1, 1001, 100'000, 200'001}) reduce_and_scatter_unevenly(each, unit);
  });
}

TEST_F(DirectFlags, ElementsOfEverySizeAreExchanged) {
  form(ranks());
  run([&](Rank& each) {
    for (const auto dtype : dtypes) {
      const auto inputs = inputs_of(each.group.size(), dtype, 1001);
      std::vector<std::span<std::byte>> outputs;
      for (const auto& input : inputs) outputs.push_back(each.gpu.allocate(input.size(), size_of(dtype) % 16));
      const auto mine = each.gpu.put(inputs[each.rank]);
      ASSERT_TRUE(ended(each.group.all_gather(mine, outputs, dtype, true, each.options())).ok());
      for (std::size_t from = 0; from < inputs.size(); ++from) {
        EXPECT_EQ(each.gpu.get(outputs[from]), inputs[from]) << name_of(dtype);
      }
      each.gpu.forget();
    }
  });
}

TEST_F(DirectFlags, AnOutputMayLieOverAnotherInput) {
  form(ranks());
  run([&](Rank& each) {
    const auto all = each.group.size();
    constexpr std::size_t count = 100'001;
    const auto between = [&](std::size_t from, std::size_t to) {
      return elements_of(DType::int32, count, 100 * from + to);
    };
    std::vector<std::span<const std::byte>> given;
    std::vector<std::span<std::byte>> taken(all);
    for (std::size_t to = 0; to < all; ++to) {
      const auto piece = each.gpu.put(between(each.rank, to));
      given.emplace_back(piece);
      // At one rank the outputs are other inputs; the others have inputs and outputs of their own.
      taken[(to + 1) % all] = each.rank == 1 ? piece : each.gpu.allocate(piece.size());
    }
    ASSERT_TRUE(ended(each.group.all_to_all(given, taken, DType::int32, true, each.options())).ok());
    for (std::size_t from = 0; from < all; ++from) EXPECT_EQ(each.gpu.get(taken[from]), between(from, each.rank));
  });
}

TEST_F(DirectFlags, AGraphOfEveryOperationIsReplayed) {
  form(ranks());
  run([&](Rank& each) {
    const auto all = each.group.size(), rank = each.rank;
    constexpr std::size_t count = 20'001;
    std::vector<std::span<std::byte>> given, gathered, exchanged;
    const auto make = [&] { return each.gpu.allocate(4 * count); };
    for (std::size_t i = 0; i < all; ++i) {
      given.push_back(make());
      gathered.push_back(make());
      exchanged.push_back(make());
    }
    const auto data = make(), reduced_to = make(), scattered = make();
    const std::vector<std::span<const std::byte>> inputs(given.begin(), given.end());
    const auto call_all = [&] {
      const auto check = [](const RawGroup::Work& work) {
        const auto status = ended(work);
        ASSERT_TRUE(status.ok()) << status.text();
      };
      auto& group = each.group;
      check(group.broadcast(data, DType::int32, 0, each.options()));
      check(group.all_gather(given[0], gathered, DType::int32, true, each.options()));
      check(group.all_to_all(inputs, exchanged, DType::int32, false, each.options()));
      check(group.reduce_scatter(inputs, reduced_to, DType::int32, Reduction::sum, each.options()));
      check(group.scatter(rank == 0 ? inputs : std::vector<std::span<const std::byte>>(), scattered, DType::int32, 0,
                          each.options()));
      check(group.gather(scattered, rank == 1 ? gathered : std::vector<std::span<std::byte>>(), DType::int32, 1,
                         each.options()));
    };
    const auto expect = [&](std::span<const std::byte> values, std::size_t expected) {
      const std::vector<std::int32_t> wanted(count, static_cast<std::int32_t>(expected));
      const auto out = each.gpu.get(values);
      EXPECT_EQ(std::memcmp(out.data(), wanted.data(), out.size()), 0) << "not " << expected;
    };
    const auto value = [](std::size_t turn, std::size_t from, std::size_t to) { return 1000 * turn + 10 * from + to; };
    CapturedGraph graph(each.gpu, call_all);
    for (std::size_t turn = 1; turn <= 4; ++turn) {
      const auto fill = [&](std::span<std::byte> to, std::size_t with) {
        const std::vector<std::int32_t> values(count, static_cast<std::int32_t>(with));
        each.gpu.copy(to.data(), std::as_bytes(std::span(values)));
        each.gpu.synchronize();
      };
      for (std::size_t to = 0; to < all; ++to) fill(given[to], value(turn, rank, to));
      fill(data, value(turn, rank, 99));
      if (turn == 3) {
        call_all();  // outside of the graph
      } else {
        graph.launch();
      }
      expect(data, value(turn, 0, 99));
      std::size_t sum = 0;
      for (std::size_t from = 0; from < all; ++from) {
        expect(exchanged[from], value(turn, from, rank));
        expect(gathered[from], rank == 1 ? value(turn, 0, from) : value(turn, from, 0));
        sum += value(turn, from, rank);
      }
      expect(reduced_to, sum);
      expect(scattered, value(turn, 0, rank));
    }
    ASSERT_TRUE(ended(each.group.barrier()).ok());
  });
}

TEST_F(DirectFlags, ReplaysThatWaitOneAfterAnotherEachHaveTheirOwnTime) {
  form(2, std::chrono::seconds(12));
  run([&](Rank& each) {
    const auto values = each.gpu.allocate(400);
    CapturedGraph graph(each.gpu, [&] {
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::int32, Reduction::sum, each.options())).ok());
    });
    for (int turn = 0; turn < 8; ++turn) {  // in all longer than the time-out
      if (each.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1700));
      graph.launch();
    }
    each.gpu.synchronize();
    const auto status = each.group.failed();
    EXPECT_TRUE(status.ok()) << status.text();
    ASSERT_TRUE(ended(each.group.barrier()).ok());
  });
}

TEST_F(DirectFlags, ACallThatOneRankAloneCapturesIsNamedAtEveryRank) {
  form(2);
  run([&](Rank& each) {
    const auto values = each.gpu.allocate(400);
    Status status;
    const auto call = [&] {
      status = ended(each.group.all_reduce(values, values, DType::int32, Reduction::sum, each.options()));
    };
    if (each.rank == 1) {
      const CapturedGraph graph(each.gpu, call);
    } else {
      call();
    }
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_THAT(status.text(), HasSubstr("captured into a CUDA graph"));
    EXPECT_THAT(status.text(), HasSubstr("rank 1"));
    ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::int32, Reduction::sum, each.options())).ok());
  });
}

// ---- inputs that the other ranks read in place

class DirectLent : public DirectFlags {
 protected:
  /// Returns how many allocations of other ranks this one has mapped, as explain() says.
  static std::size_t borrowed(const RawGroup& group) {
    const auto said = group.explain(collectives::Operation::all_reduce, 1000);
    const std::string_view before = "; inputs in ";
    const auto at = said.find(before);
    return at == std::string::npos ? 0 : std::stoul(said.substr(at + before.size()));
  }
  static void mark(std::span<const std::byte> memory) {
    collectives::cuda::mark_symmetric(0, memory.data(), memory.size());  // any GPU knows the memory of all
  }
  static void invalidate(std::span<const std::byte> memory) { invalidate_cuda_memory(memory.data(), memory.size()); }
  template <class Condition>
  static bool comes_true(const Condition& condition) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!condition() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return condition();
  }
};

TEST_F(DirectLent, OperationsOfAllSizesReadThemInPlace) {
  form(ranks());
  run([&](Rank& each) {
    const auto all = each.group.size();
    const auto memory = each.gpu.allocate(gpu_bytes - 16);
    each.gpu.forget();
    if (each.rank != 1) mark(memory);  // that of one rank is ordinary
    EXPECT_EQ(borrowed(each.group), 0);
    for (const std::size_t count : {1, 37, 4099, 80'000, 300'001, 750'001}) {
      run_every_operation(each, count);
      const auto inputs = inputs_of(all, DType::float32, count);
      const auto expected = reduced(inputs, DType::float32, Reduction::average);
      // In place, and with an output elsewhere; at one rank the input begins at no multiple of 16 bytes.
      const auto in = each.gpu.put(inputs[each.rank], each.rank == 2 ? 4 : 0);
      const auto out = each.gpu.allocate(in.size());
      ASSERT_TRUE(ended(each.group.all_reduce(in, out, DType::float32, Reduction::average, each.options())).ok());
      EXPECT_EQ(each.gpu.get(out), expected) << count;
      EXPECT_EQ(each.gpu.get(in), inputs[each.rank]) << count;
      ASSERT_TRUE(ended(each.group.all_reduce(in, in, DType::float32, Reduction::average, each.options())).ok());
      EXPECT_EQ(each.gpu.get(in), expected) << count;
      each.gpu.forget();
    }
    EXPECT_EQ(borrowed(each.group), all - (each.rank == 1 ? 1 : 2));
    invalidate(memory);
  });
}

/// Fills `count` floats so that the sum of two ranks is known.
std::vector<float> ramp(std::size_t count, std::size_t rank) {
  std::vector<float> out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<float>((i + rank) % 1001);
  return out;
}

void expect_sum_of_ramps(const Bytes& found) {
  for (std::size_t i = 0; i < found.size() / 4; i += 997) {
    float value = 0;
    std::memcpy(&value, found.data() + 4 * i, sizeof value);
    ASSERT_EQ(value, static_cast<float>(i % 1001 + (i + 1) % 1001)) << i;
  }
}

TEST_F(DirectLent, LargeOnesAreReducedWhereTheyLie) {
  form(2);
  run([&](Rank& each) {
    const auto own = ramp((std::size_t{20} << 20) / 4 + 5, each.rank);
    const auto values = each.gpu.put(std::as_bytes(std::span(own)));
    mark(values);
    ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::float32, Reduction::sum, each.options())).ok());
    EXPECT_EQ(borrowed(each.group), 1);
    expect_sum_of_ramps(each.gpu.get(values));
    invalidate(values);
  });
}

TEST_F(DirectLent, AreNotWrittenByOtherRanksIfTheOutputOfOneIsElsewhere) {
  form(2);
  run([&](Rank& each) {
    const auto own = ramp((std::size_t{20} << 20) / 4 + 5, each.rank);  // more than kernels that meet by flags take
    const auto values = each.gpu.put(std::as_bytes(std::span(own)));
    const auto elsewhere = each.gpu.allocate(values.size());
    mark(values);
    const auto output = each.rank == 1 ? elsewhere : values;
    ASSERT_TRUE(ended(each.group.all_reduce(values, output, DType::float32, Reduction::sum, each.options())).ok());
    EXPECT_EQ(borrowed(each.group), 1);
    expect_sum_of_ramps(each.gpu.get(output));
    if (each.rank == 1) {
      const auto kept = each.gpu.get(values);
      EXPECT_EQ(std::memcmp(kept.data(), own.data(), kept.size()), 0);
    }
    invalidate(values);
  });
}

TEST_F(DirectLent, OfOneOperationAreNotReadByTheNextOneOfTheSameCall) {
  form(2);
  run([&](Rank& each) {
    const auto memory = each.gpu.allocate(gpu_bytes - 16);
    each.gpu.forget();
    mark(memory);
    const auto options = each.options();
    // The second goes by words, so it lends nothing.
    for (const std::size_t count : {std::size_t{3004}, (std::size_t{6} << 20) / 4}) {
      std::vector<std::vector<std::byte>> of_ranks;
      for (std::size_t rank = 0; rank < 2; ++rank) of_ranks.push_back(elements_of(DType::int32, 2 * count, rank));
      const auto input = each.gpu.put(of_ranks[each.rank]);
      const auto output = each.gpu.allocate(4 * count);
      const std::vector<collectives::InBytes> pieces{input.first(4 * count), input.last(4 * count)};
      auto same_run = collectives::StartOptions{};
      same_run.background = false;
      same_run.device = options.device;
      const auto work = each.group.reduce_scatter(pieces, output, DType::int32, Reduction::sum, std::move(same_run));
      ASSERT_TRUE(ended(work).ok());
      const auto sum = reduced(of_ranks, DType::int32, Reduction::sum);
      const auto share = std::span(sum).subspan(each.rank * 4 * count, 4 * count);
      EXPECT_EQ(each.gpu.get(output), std::vector(share.begin(), share.end())) << count;
    }
    invalidate(memory);
  });
}

TEST_F(DirectLent, ThoseOfAllRanksAreReducedWhereTheyLie) {
  form(ranks());
  run([&](Rank& each) {
    const auto memory = each.gpu.allocate(gpu_bytes - 16);
    each.gpu.forget();
    mark(memory);
    for (const auto dtype : {DType::bfloat16, DType::complex64}) {
      const auto count = (std::size_t{17} << 20) / size_of(dtype) + 3;  // more than the halves of buffers hold
      const auto inputs = inputs_of(each.group.size(), dtype, count);
      const auto values = each.gpu.put(inputs[each.rank]);
      // What lies behind the tensor is not the operation's.
      const auto behind = each.gpu.put(std::span(inputs[0]).first(1000));
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, dtype, Reduction::sum, each.options())).ok());
      EXPECT_EQ(each.gpu.get(values), reduced(inputs, dtype, Reduction::sum)) << name_of(dtype);
      EXPECT_EQ(std::memcmp(each.gpu.get(behind).data(), inputs[0].data(), behind.size()), 0);
      ASSERT_TRUE(ended(each.group.barrier()).ok());  // the next tensor lies where this one does
      each.gpu.forget();
    }
    invalidate(memory);
  });
}

TEST_F(DirectLent, TheirOwnersMayWriteThemAgainInTheOrderOfTheStream) {
  form(ranks());
  run([&](Rank& each) {
    constexpr std::size_t count = 50'000;  // one shot
    const auto in = each.gpu.allocate(4 * count), out = each.gpu.allocate(4 * count),
               large = each.gpu.allocate(1 << 20);
    mark(in);
    mark(large);
    std::vector<std::span<std::byte>> gathered;
    for (std::size_t from = 0; from < each.group.size(); ++from) gathered.push_back(each.gpu.allocate(large.size()));
    const auto fill = [&](std::span<std::byte> to, std::int32_t value) {
      const std::vector<std::int32_t> values(to.size() / 4, value);
      each.gpu.copy(to.data(), std::as_bytes(std::span(values)));
    };
    const auto holds = [&](std::span<const std::byte> values, std::int32_t expected) {
      const std::vector<std::int32_t> wanted(values.size() / 4, expected);
      const auto found = each.gpu.get(values);
      return std::memcmp(found.data(), wanted.data(), found.size()) == 0;
    };
    const auto all = static_cast<std::int32_t>(each.group.size()), rank = static_cast<std::int32_t>(each.rank);
    for (std::int32_t turn = 0; turn < 20; ++turn) {
      fill(in, turn + rank);
      fill(large, turn * 10 + rank);
      if (turn % 5 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ASSERT_TRUE(ended(each.group.all_reduce(in, out, DType::int32, Reduction::sum, each.options())).ok());
      ASSERT_TRUE(ended(each.group.all_gather(large, gathered, DType::int32, true, each.options())).ok());
      fill(in, -1);
      fill(large, -1);
      EXPECT_TRUE(holds(out, turn * all + all * (all - 1) / 2)) << turn;
      for (std::int32_t from = 0; from < all; ++from) {
        EXPECT_TRUE(holds(gathered[static_cast<std::size_t>(from)], turn * 10 + from)) << turn;
      }
    }
    EXPECT_EQ(borrowed(each.group), each.group.size() - 1);
    invalidate(in);
  });
}

TEST_F(DirectLent, ThoseInPiecesOfNoMultipleOf16BytesAreCopiedBeforeAReduceScatter) {
  form(ranks());
  run([&](Rank& each) {
    const auto all = each.group.size();
    const auto memory = each.gpu.allocate(gpu_bytes - 16);
    each.gpu.forget();
    if (each.rank != 1) mark(memory);  // that of one rank is ordinary
    for (const std::size_t count : {10'001, 10'004}) {
      const auto rows = inputs_of(all, DType::float32, all * count);
      const auto in = each.gpu.put(rows[each.rank]);
      const auto out = each.gpu.allocate(4 * count);
      std::vector<std::span<const std::byte>> given;
      for (std::size_t to = 0; to < all; ++to) given.emplace_back(in.subspan(to * out.size(), out.size()));
      const auto sum = reduced(rows, DType::float32, Reduction::sum);
      ASSERT_TRUE(ended(each.group.reduce_scatter(given, out, DType::float32, Reduction::sum, each.options())).ok());
      EXPECT_EQ(std::memcmp(each.gpu.get(out).data(), sum.data() + each.rank * out.size(), out.size()), 0) << count;
      // Kernels share out what is not aligned in another way than they copy it.
      EXPECT_EQ(borrowed(each.group), count == 10'001 ? 0 : all - (each.rank == 1 ? 1 : 2));
      each.gpu.forget();
    }
    invalidate(memory);
  });
}

TEST_F(DirectLent, AreUnmappedWhenTheirOwnerSaysThatTheyGoAndLentAnewAfterwards) {
  form(2);
  run([&](Rank& each) {
    const auto values = each.gpu.allocate(80'000);
    const auto sum = [&] {
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::int32, Reduction::sum, each.options())).ok());
      each.gpu.synchronize();
      ASSERT_TRUE(ended(each.group.barrier()).ok());
    };
    const auto out = each.gpu.allocate(80'000);
    const auto sum_elsewhere = [&] {
      ASSERT_TRUE(ended(each.group.all_reduce(values, out, DType::int32, Reduction::sum, each.options())).ok());
      each.gpu.synchronize();
      ASSERT_TRUE(ended(each.group.barrier()).ok());
    };
    sum();
    EXPECT_EQ(borrowed(each.group), 0);  // it is ordinary memory
    mark(values);
    sum_elsewhere();
    EXPECT_EQ(borrowed(each.group), 1);
    each.run.reset();  // an operation keeps what it reads
    ASSERT_TRUE(ended(each.group.barrier()).ok());
    if (each.rank == 0) invalidate(values);
    if (each.rank == 1) {
      EXPECT_TRUE(comes_true([&] { return borrowed(each.group) == 0; }));
    }
    ASSERT_TRUE(ended(each.group.barrier()).ok());
    EXPECT_EQ(borrowed(each.group), 1 - each.rank);
    sum_elsewhere();  // the mark of rank 0 has gone with its memory
    EXPECT_EQ(borrowed(each.group), 1 - each.rank);
    mark(values);
    sum_elsewhere();
    EXPECT_EQ(borrowed(each.group), 1);
    invalidate(values);
  });
}

TEST_F(DirectLent, AreReadInPlaceByGraphsTooAndStayMappedForThem) {
  form(ranks());
  run([&](Rank& each) {
    const auto all = static_cast<std::int32_t>(each.group.size()), rank = static_cast<std::int32_t>(each.rank);
    const auto in = each.gpu.allocate(80'000), out = each.gpu.allocate(80'000);
    mark(in);
    CapturedGraph graph(each.gpu, [&] {
      ASSERT_TRUE(ended(each.group.all_reduce(in, out, DType::int32, Reduction::sum, each.options())).ok());
    });
    EXPECT_EQ(borrowed(each.group), each.group.size() - 1);
    Gpu elsewhere(each.gpu.device, 1 << 20);
    const auto once = elsewhere.allocate(80'000);  // no graph reads it
    mark(once);
    ASSERT_TRUE(ended(each.group.all_reduce(once, out, DType::int32, Reduction::sum, each.options())).ok());
    EXPECT_EQ(borrowed(each.group), 2 * (each.group.size() - 1));
    each.gpu.synchronize();
    each.run.reset();
    for (std::int32_t turn = 0; turn < 4; ++turn) {
      const std::vector<std::int32_t> values(20'000, turn + rank), wanted(20'000, turn * all + all * (all - 1) / 2);
      each.gpu.copy(in.data(), std::as_bytes(std::span(values)));
      graph.launch();
      const auto found = each.gpu.get(out);
      EXPECT_EQ(std::memcmp(found.data(), wanted.data(), found.size()), 0) << turn;
      if (turn != 1) continue;
      ASSERT_TRUE(ended(each.group.barrier()).ok());
      for (const auto& memory : {in, once}) invalidate(memory);
      EXPECT_TRUE(comes_true([&] { return borrowed(each.group) == each.group.size() - 1; }));
    }
    ASSERT_TRUE(ended(each.group.barrier()).ok());
  });
}

TEST_F(DirectLent, OrdinaryOnesAreToFromTheSizeThatTuningHasMeasured) {
  form(2);
  std::optional<collectives::TuningKey> key;
  run([&](Rank& each) {
    if (each.rank == 0) key = each.group.gpu_tuning_key();
  });
  ASSERT_TRUE(key);
  const auto path = ::testing::TempDir() + "tensorferry-lent-" + std::to_string(::getpid()) + ".json";
  std::ofstream(path) << R"({"measured": [{"topology": ")" << key->topology << R"(", "device": ")" << key->device
                      << R"(", "ranks": 2, "version": ")" << key->version
                      << R"(", "mapped_from": 131072, "crossings": {"all_reduce": "one_shot"}}]})";
  ::setenv("TENSORFERRY_TUNING", path.c_str(), 1);
  gpus.clear();
  form(2);
  run([&](Rank& each) {
    const auto in = each.gpu.allocate(131'072), out = each.gpu.allocate(131'072);
    for (const std::size_t bytes : {131'068, 131'072}) {
      ASSERT_TRUE(
          ended(each.group.all_reduce(in.first(bytes), out.first(bytes), DType::int32, Reduction::sum, each.options()))
              .ok());
      EXPECT_EQ(borrowed(each.group), bytes == 131'072 ? 1 : 0);
    }
  });
  ::unsetenv("TENSORFERRY_TUNING");
  std::filesystem::remove(path);
}

// The tests that fail a group come last: its buffers are freed up to 10 s later. A driver that frees lets no rank of
// the process launch a kernel meanwhile, and waits for kernels that may wait for that rank.
TEST_F(DirectFlags, AGraphThatWaitsForARankIsReleasedWhenTheGroupFails) {
  form(2);
  std::atomic<bool> launched{false}, aborting{false}, released{false};
  run([&](Rank& each) {
    const auto values = each.gpu.allocate(400);
    CapturedGraph graph(each.gpu, [&] {
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::int32, Reduction::sum, each.options())).ok());
    });
    if (each.rank == 0) {  // rank 1 launches no graph
      graph.launch();
      launched = true;
      each.gpu.synchronize();
      EXPECT_TRUE(aborting) << "it waited for nothing";
      released = true;
      EXPECT_EQ(each.group.failed().code(), Code::cancelled);
    } else {
      while (!launched) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      aborting = true;
      each.group.abort("the test says so");
      while (!released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

TEST_F(DirectFlags, AReplayThatWaitsLongerThanTheTimeoutNamesTheRank) {
  form(2, std::chrono::seconds(under_sanitizer ? 20 : 6));  // also for the capture, which loads kernels
  std::atomic<bool> released{false};
  run([&](Rank& each) {
    const auto values = each.gpu.allocate(400);
    CapturedGraph graph(each.gpu, [&] {
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::int32, Reduction::sum, each.options())).ok());
    });
    if (each.rank == 0) {  // rank 1 launches no graph
      graph.launch();
      each.gpu.synchronize();
      released = true;
      EXPECT_EQ(each.group.failed().code(), Code::deadline_exceeded);
      EXPECT_THAT(each.group.failed().text(), HasSubstr("a replay of a CUDA graph"));
      EXPECT_THAT(each.group.failed().text(), HasSubstr("rank 1"));
      EXPECT_THAT(each.group.failed().text(), Not(HasSubstr("rank 0")));
    } else {
      while (!released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

TEST_F(DirectFlags, AReplayThatWaitsIsReleasedAlsoIfTheGroupsGpusHaveBeenDropped) {
  form(2);
  std::atomic<bool> dropped{false};
  world->run([&](std::size_t rank, RawGroup& group) {
    ASSERT_TRUE(directs[rank]->prepare(gpus[rank]->device, {}).ok());
    Rank each{rank, group, *directs[rank], *gpus[rank]};
    const auto values = each.gpu.allocate(400);
    CapturedGraph graph(each.gpu, [&] {
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::int32, Reduction::sum, each.options())).ok());
    });
    if (rank == 0) {  // rank 1 launches no graph
      graph.launch();
      each.run.reset();
      directs[0].reset();
      dropped = true;
      each.gpu.synchronize();
      EXPECT_EQ(each.group.failed().code(), Code::cancelled);
    } else {
      while (!dropped) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      each.group.abort("the test says so");
    }
  });
}

TEST_F(Direct, CallsThatDifferAreNamedAtEveryRankAndTheGroupGoesOn) {
  form(3);
  run([&](Rank& each) {
    const std::vector<float> ones(10, 1);
    const auto values = each.gpu.put(std::as_bytes(std::span(ones)));
    const auto some = values.first(each.rank == 1 ? 8 : 40);
    const auto status = ended(each.group.all_reduce(some, some, DType::float32, Reduction::sum, each.options()));
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_THAT(status.text(), HasSubstr("rank 1"));
    EXPECT_THAT(status.text(), HasSubstr("2 float32 elements on a GPU"));
    ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::float32, Reduction::sum, each.options())).ok());
    float first = 0;
    std::memcpy(&first, each.gpu.get(values).data(), sizeof first);
    EXPECT_EQ(first, 3);
  });
}

TEST_F(Direct, CallsThatDifferInTheSizesOfTheirPiecesAreRefusedAtEveryRank) {
  form(3);
  run([&](Rank& each) {
    const auto memory = each.gpu.allocate(100);
    const auto refused = [&](std::initializer_list<std::size_t> sizes) {
      std::vector<std::span<const std::byte>> given;
      for (const auto size : sizes) given.emplace_back(memory.first(size));
      const auto out = each.gpu.allocate(given[each.rank].size());
      const auto status = ended(each.group.reduce_scatter(given, out, DType::int32, Reduction::sum, each.options()));
      EXPECT_EQ(status.code(), Code::invalid_argument) << status.text();
      return status.text();
    };
    // As many bytes in all. First one rank has even pieces.
    EXPECT_THAT(each.rank == 1 ? refused({8, 8, 8}) : refused({4, 8, 12}), HasSubstr("rank 1"));
    ASSERT_TRUE(ended(each.group.barrier()).ok());
    EXPECT_THAT(each.rank == 1 ? refused({12, 8, 4}) : refused({4, 8, 12}),
                HasSubstr("rank 1 (\"rank1\") gives 12 bytes to rank 0 (\"rank0\"), which expects 4"));
  });
}

class DirectRoots : public Direct, public ::testing::WithParamInterface<bool> {};

TEST_P(DirectRoots, PiecesOfOtherSizesAtTheRootAreRefusedAtEveryRank) {
  form(3);
  run([&](Rank& each) {
    const auto own = each.gpu.allocate(32);
    // The root has 16 bytes more for rank 2.
    std::vector<std::span<std::byte>> pieces;
    for (const std::size_t size : {32, 32, 48}) pieces.push_back(each.gpu.allocate(size));
    const std::vector<std::span<const std::byte>> given(pieces.begin(), pieces.end());
    const auto status = ended(GetParam() ? each.group.scatter(given, own, DType::int32, 0, each.options())
                                         : each.group.gather(own, pieces, DType::int32, 0, each.options()));
    EXPECT_EQ(status.code(), Code::invalid_argument) << status.text();
    EXPECT_THAT(status.text(), HasSubstr(GetParam() ? "rank 0 (\"rank0\") gives 48 bytes to rank 2 (\"rank2\"), which "
                                                      "expects 32"
                                                    : "rank 2 (\"rank2\") gives 32 bytes to rank 0 (\"rank0\"), which "
                                                      "expects 48"));
  });
}
INSTANTIATE_TEST_SUITE_P(Operations, DirectRoots, ::testing::Bool(),
                         [](const auto& each) { return each.param ? "scatter" : "gather"; });

TEST_F(Direct, TensorsOfTheHostAtOneRankAreNamedAsAnotherCall) {
  form(2);
  std::vector<float> values(10, 1);
  world->run([&](std::size_t rank, RawGroup& group) {
    const auto status =
        rank == 0 ? directs[rank]->prepare(0, {}).status()
                  : ended(group.all_reduce(bytes_in(values), bytes_in(values), DType::float32, Reduction::sum));
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_THAT(status.text(), HasSubstr("its first operation on a GPU"));
  });
}

/// A word for which a stream waits, until the host sets it.
class Gate {
 public:
  explicit Gate(const Gpu& gpu) : page_(*cuda::Pinned::lock(*SharedMemory::create(4096), gpu.device)) {
    const cuda::DeviceGuard here(gpu.device);
    EXPECT_EQ(cuda::word_at(page_, 0).wait_on(gpu.stream, 1), CUDA_SUCCESS);
  }
  void open() { cuda::word_at(page_, 0).set(1); }

 private:
  cuda::Pinned page_;
};

/// Sums up `values`, float32, of all ranks in place. Returns the result of the operation.
Status sum_up(Direct::Rank& each, std::span<std::byte> values) {
  return ended(each.group.all_reduce(values, values, DType::float32, Reduction::sum, each.options()));
}

/// Returns ones on the GPU that all ranks have summed up once; nothing if that has failed. The first operation loads
/// kernels, and the driver may wait for the streams then: they have ended it.
std::span<std::byte> summed_once(Direct::Rank& each, std::size_t count = 10) {
  const std::vector<float> ones(count, 1);
  const auto values = each.gpu.put(std::as_bytes(std::span(ones)));
  if (!sum_up(each, values).ok()) return {};
  each.gpu.synchronize();
  each.direct.drain();
  return values;
}

TEST_F(Direct, AStreamThatDoesNotComeInTimeIsNamedAndTheOthersAreReleased) {
  form(2, std::chrono::seconds(under_sanitizer ? 20 : 6));  // also for the first operation, which loads kernels
  std::atomic<bool> released{false};
  run([&](Rank& each) {
    const auto values = summed_once(each);
    ASSERT_FALSE(values.empty());
    std::optional<Gate> gate;
    if (each.rank == 1) gate.emplace(each.gpu);
    ASSERT_TRUE(sum_up(each, values).ok());
    if (each.rank == 1) {
      while (!released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      gate->open();
    }
    each.gpu.synchronize();
    each.direct.drain();
    released = true;
    EXPECT_TRUE(each.run->ended());
    if (each.rank == 1) return;
    EXPECT_EQ(each.run->status().code(), Code::deadline_exceeded) << each.run->status().text();
    EXPECT_THAT(each.group.failed().text(), HasSubstr("rank 1"));
    EXPECT_THAT(each.group.failed().text(), HasSubstr("reached its timeout"));
    EXPECT_EQ(sum_up(each, values).code(), Code::deadline_exceeded);
  });
}

TEST_F(Direct, OfRanksWhoseStreamsWaitTheLateOneAloneIsNamed) {
  form(3, std::chrono::seconds(under_sanitizer ? 20 : 6), "by_one");  // meets twice
  std::atomic<int> failed{0};
  run([&](Rank& each) {
    const auto values = summed_once(each, 1 << 18);  // by words
    ASSERT_FALSE(values.empty());
    std::optional<Gate> gate;
    if (each.rank == 1) gate.emplace(each.gpu);
    ASSERT_TRUE(sum_up(each, values).ok());
    while (each.group.failed().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ++failed;
    while (failed < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // all see rank 1 wait at the gate
    // Another rank may be named as the one that gave up. Told by it, rank 1 reads that it "had" not come.
    EXPECT_THAT(each.group.failed().text(), ContainsRegex("rank 1 [^:]*ha[sd] not come"));
    EXPECT_THAT(each.group.failed().text(), Not(ContainsRegex("rank [02] [^:]*ha[sd] not come")));
    if (gate) gate->open();
    each.gpu.synchronize();
  });
}

TEST_F(Direct, OfAFailedGroupALateStreamHasNoResult) {
  form(2, std::chrono::seconds(under_sanitizer ? 150 : 40), "by_one");
  std::atomic<int> enqueued{0};
  std::atomic<bool> released{false};
  run([&](Rank& each) {
    const auto values = summed_once(each, 1 << 18);  // by words
    ASSERT_FALSE(values.empty());
    std::optional<Gate> gate;
    if (each.rank == 1) gate.emplace(each.gpu);
    ASSERT_TRUE(sum_up(each, values).ok());
    ++enqueued;
    while (enqueued < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // Rank 1 hears of the failure when rank 0's stream has been released, and writes words as if all were well.
    while (each.rank == 1 && !released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    each.group.fail({Code::cancelled, "the test says so"}, false);
    if (gate) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // longer than DeviceWatch::grace
      gate->open();
    }
    each.gpu.synchronize();
    released = true;
    EXPECT_EQ(each.run->status().code(), Code::cancelled) << each.rank;
  });
}

TEST_F(Direct, ACallbackThatWaitsForTheStreamDoesNotHoldUpItsRelease) {
  form(2, std::chrono::seconds(under_sanitizer ? 20 : 6));
  const auto told = std::make_shared<std::atomic<bool>>(false);
  run([&](Rank& each) {
    const auto values = summed_once(each);
    ASSERT_FALSE(values.empty());
    std::optional<Gate> gate;
    if (each.rank == 1) gate.emplace(each.gpu);
    std::vector<std::byte> never(1);
    RawGroup::Work receive;
    if (each.rank == 0) {
      collectives::StartOptions options;
      options.timeout = std::chrono::minutes(5);
      receive = each.group.receive(never, DType::uint8, 1, 7, options);
      receive->on_done([told, &gpu = each.gpu](const Status&) {
        gpu.synchronize();
        *told = true;
      });
    }
    ASSERT_TRUE(sum_up(each, values).ok());
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!*told && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(*told);
    if (gate) gate->open();
    each.gpu.synchronize();
  });
}

TEST_F(Direct, ARankThatFailsReleasesTheStreamsThatWaitForIt) {
  form(2);
  std::atomic<bool> released{false};
  std::atomic<int> enqueued{0};
  run([&](Rank& each) {
    const auto values = summed_once(each);
    ASSERT_FALSE(values.empty());
    std::optional<Gate> gate;
    if (each.rank == 1) gate.emplace(each.gpu);
    const auto status = sum_up(each, values);
    EXPECT_TRUE(status.ok()) << status.text();
    ++enqueued;
    if (each.rank == 1) {
      while (enqueued < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      each.group.abort("the test says so");
      while (!released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      gate->open();
    }
    each.gpu.synchronize();
    released = true;
    each.direct.drain();
    if (each.rank == 0) {
      EXPECT_EQ(each.run->status().code(), Code::cancelled);
      EXPECT_THAT(each.run->status().text(), HasSubstr("the test says so"));
    }
  });
}

TEST_F(Direct, AnOperationThatHasItsWordsEndsWellAlthoughARankLeavesTheGroup) {
  form(2);
  std::atomic<bool> draining{false}, opening{false};
  run([&](Rank& each) {
    const std::vector<float> ones(10, 1);
    const auto values = each.gpu.put(std::as_bytes(std::span(ones)));
    ASSERT_TRUE(sum_up(each, values).ok());
    std::optional<Gate> gate;
    if (each.rank == 0) gate.emplace(each.gpu);
    ASSERT_TRUE(sum_up(each, values).ok());
    if (each.rank == 1) {
      // Its own stream waits for rank 0's.
      std::thread leaver([&] {
        draining = true;
        each.direct.drain();
        EXPECT_TRUE(opening) << "it left without its stream's end";
        each.group.close();
      });
      leaver.join();
    } else {
      while (!draining) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      opening = true;
      gate->open();
    }
    each.direct.drain();
    EXPECT_TRUE(each.run->status().ok()) << each.run->status().text();
    float first = 0;
    std::memcpy(&first, each.gpu.get(values).data(), sizeof first);
    EXPECT_EQ(first, 4);
  });
}

TEST_F(Direct, ARankWhoseStreamIsStuckLeavesAFailedGroup) {
  form(2);
  std::atomic<int> enqueued{0};
  std::atomic<bool> aborted{false};
  run([&](Rank& each) {
    const auto values = summed_once(each);
    ASSERT_FALSE(values.empty());
    std::optional<Gate> gate;
    if (each.rank == 0) gate.emplace(each.gpu);
    ASSERT_TRUE(sum_up(each, values).ok());
    ++enqueued;
    if (each.rank == 1) {
      while (enqueued < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      each.group.abort("the test says so");
      aborted = true;
      return;
    }
    // As after a fault of the device, the operation never ends.
    while (!aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    auto left = std::async(std::launch::async, [&] { each.direct.drain(); });
    EXPECT_EQ(left.wait_for(std::chrono::seconds(30)), std::future_status::ready);
    EXPECT_FALSE(each.run->ended());
    EXPECT_EQ(each.run->status().code(), Code::cancelled);
    gate->open();
    each.gpu.synchronize();
  });
}

class Staged : public Direct {
 protected:
  void expect_reason(std::string_view reason) {
    world->run([&](std::size_t rank, RawGroup& group) {
      const auto staged = directs[rank]->prepare(static_cast<int>(rank) % cuda::devices(), {});
      ASSERT_TRUE(staged.ok()) << staged.status().text();
      EXPECT_THAT(*staged, HasSubstr(reason));
      EXPECT_THAT(group.explain(collectives::Operation::all_reduce, 1000), HasSubstr(*staged));
    });
  }
};

TEST_F(Staged, FewHardwareQueuesAreTheReason) {
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  form(2);
  expect_reason("CUDA_DEVICE_MAX_CONNECTIONS");
}

TEST_F(Staged, RanksWithoutABoardAreTheReason) {
  world = std::make_unique<GroupWorld>(2);
  world->form(GroupWorld::settings_of({2, "messages"}));
  for (const auto& group : world->groups)
    directs.push_back(DirectGroup::of(group, DirectGroup::Threads::may_share_a_gpu));
  expect_reason("the option board is off");
}

TEST_F(Staged, ThreadsOfOneProcessThatShareAGpuAreTheReason) {
  const auto ranks = static_cast<std::size_t>(cuda::devices()) + 1;
  world = std::make_unique<GroupWorld>(ranks);
  world->form(GroupWorld::settings_of({ranks}));
  for (const auto& group : world->groups) directs.push_back(DirectGroup::of(group));
  expect_reason("are threads of one process and share a GPU");
}

TEST_F(Staged, TheTopologyIsNamedToo) {
  if (!is_emulated()) GTEST_SKIP() << "needs emulated GPUs";
  ::setenv("EMULATED_GPU_PEER_ACCESS", "0", 1);
  ::setenv("EMULATED_MACHINE", "cloud-t4", 1);
  form(2);
  expect_reason("no peer access");
  EXPECT_THAT(
      world->groups[1]->explain(collectives::Operation::all_reduce, 1000),
      HasSubstr(
          "The topology of the GPUs is \"no peer access\": there is no peer access between the GPUs of ranks 0 and 1"));
  EXPECT_FALSE(world->groups[1]->gpu_tuning_key());
}

TEST_F(Staged, GpusWithoutPeerAccessAreTheReason) {
  if (!is_emulated()) GTEST_SKIP() << "needs emulated GPUs";
  ::setenv("EMULATED_GPU_PEER_ACCESS", "0", 1);
  form(2);
  expect_reason("no peer access");
}

}  // namespace
}  // namespace tensorferry::testing
