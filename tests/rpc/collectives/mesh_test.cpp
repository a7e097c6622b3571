// Reductions over a hybrid cube mesh, whose ranks reach their neighbours alone: on emulated GPUs that have the links
// and the peer access of a DGX-1V. The kernels also run on one GPU, real or emulated, that all ranks have.
#include <gmock/gmock.h>

#include <atomic>
#include <cstring>
#include <optional>

#include "base/shared_memory.h"
#include "channels/cuda/pinned.h"
#include "rpc/collectives/cuda/reductions.h"
#include "tests/rpc/collectives/direct_ranks.h"

namespace tensorferry::testing {
namespace {

using collectives::Operation;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::size_t all_ranks = 8;

class MeshGroup : public Direct {
 protected:
  static void SetUpTestSuite() { emulate_cube_mesh(); }
  void SetUp() override {
    Direct::SetUp();
    if (!IsSkipped() && !is_emulated()) GTEST_SKIP() << "needs emulated GPUs";
  }
  /// Forms a group whose rank r has the GPU gpus_of_ranks[r].
  void form_on(const std::vector<int>& gpus_of_ranks) {
    form(all_ranks);
    gpus.clear();
    for (const auto gpu : gpus_of_ranks) gpus.push_back(std::make_unique<Gpu>(gpu, gpu_bytes));
  }
};

// In one shot and in two, also in several chunks. Other numbers of blocks use the halves in turns.
void reduce_all_sizes_over_mesh(Direct::Rank& each) {
  reduce_all_sizes(each, {1, 16'384, 3, 16'385, 37, 300'001, 7, 2'200'003, 100, 70'000, 0, 5});
}

TEST_F(MeshGroup, ReducesAllSizesAndAlignmentsToTheBitsThatTheHostGives) {
  form(all_ranks);
  run(reduce_all_sizes_over_mesh);
}

TEST_F(MeshGroup, ReducesAlikeIfTheRanksOfAQuadDoNotFollowOneAnother) {
  form_on({6, 0, 3, 5, 4, 1, 7, 2});
  run(reduce_all_sizes_over_mesh);
}

TEST_F(MeshGroup, ExplainSaysWhatGoesOverTheMeshAndWhyTheRestDoesNot) {
  form(all_ranks);
  run([&](Rank& each) {
    const auto said = [&](Operation operation, std::size_t bytes) { return each.group.explain(operation, bytes); };
    EXPECT_THAT(said(Operation::all_reduce, 64 << 10),
                AllOf(HasSubstr("kernels: one_shot (two_shot is for more than 65536 bytes, by default"),
                      HasSubstr(", whose kernels meet by flags"), HasSubstr("; over the hybrid cube mesh, each rank"),
                      HasSubstr("joined by hybrid cube mesh: each GPU has NVLinks to three of its own mesh")));
    EXPECT_THAT(said(Operation::all_reduce, (64 << 10) + 1), HasSubstr("kernels: two_shot ("));
    EXPECT_THAT(said(Operation::reduce, std::size_t{1} << 30),
                AllOf(HasSubstr("kernels: two_shot ("), HasSubstr("over the hybrid cube mesh")));
    EXPECT_THAT(said(Operation::broadcast, 100),
                AllOf(HasSubstr("Tensors of GPUs are copied through host memory, because "),
                      HasSubstr("no peer access"), HasSubstr("over a hybrid cube mesh go all_reduce and reduce alone"),
                      HasSubstr("The topology of the GPUs is \"hybrid cube mesh\"")));
    const auto key = each.group.gpu_tuning_key();
    ASSERT_TRUE(key);
    EXPECT_EQ(key->topology, "hybrid cube mesh");
    EXPECT_EQ(key->device, "Tesla V100-SXM2-16GB");
    EXPECT_EQ(key->ranks, all_ranks);
  });
}

TEST_F(MeshGroup, OtherOperationsAreStagedAndNotCaptured) {
  form(all_ranks);
  run([&](Rank& each) {
    const auto staged = [&](Operation operation) { return each.direct.why_staged(each.gpu.device, operation); };
    const auto not_captured = [&](Operation operation) {
      return each.direct.why_not_captured(each.gpu.device, operation);
    };
    for (const auto operation : {Operation::all_reduce, Operation::reduce}) {
      EXPECT_EQ(staged(operation), "");
      EXPECT_EQ(not_captured(operation), "");
    }
    for (const auto operation : {Operation::broadcast, Operation::all_gather, Operation::gather, Operation::scatter,
                                 Operation::reduce_scatter, Operation::all_to_all}) {
      EXPECT_THAT(staged(operation), HasSubstr("over a hybrid cube mesh go all_reduce and reduce alone"));
      EXPECT_THAT(not_captured(operation), HasSubstr("the tensors are copied through host memory, because"));
    }
    // A caller that passes over why_staged() gets an error at every rank.
    const auto values = each.gpu.allocate(400);
    const auto status = ended(each.group.broadcast(values, DType::int32, 0, each.options()));
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_THAT(status.text(), HasSubstr("goes through host memory"));
  });
}

TEST_F(MeshGroup, AGraphOfReductionsIsReplayedBetweenOthers) {
  form(all_ranks);
  run([&](Rank& each) {
    // In one shot, in two, and in two chunks.
    constexpr std::array<std::size_t, 4> counts{100, 50'000, 7, 1'100'000};
    std::vector<std::span<std::byte>> values;
    for (const auto count : counts) values.push_back(each.gpu.allocate(4 * count));
    const auto reduce_all = [&] {
      for (const auto& each_value : values) {
        const auto work = each.group.all_reduce(each_value, each_value, DType::int32, Reduction::sum, each.options());
        const auto status = ended(work);
        ASSERT_TRUE(status.ok()) << status.text();
      }
    };
    CapturedGraph graph(each.gpu, reduce_all);
    for (std::int32_t turn = 1; turn <= 4; ++turn) {
      for (std::size_t i = 0; i < counts.size(); ++i) {
        const std::vector<std::int32_t> given(counts.at(i), turn + static_cast<std::int32_t>(each.rank));
        each.gpu.copy(values[i].data(), std::as_bytes(std::span(given)));
        each.gpu.synchronize();
      }
      graph.launch();
      auto expected = static_cast<std::int32_t>(all_ranks) * turn + 28;
      if (turn % 2 == 0) {  // operations outside of the graph, between its launches
        reduce_all();
        expected *= static_cast<std::int32_t>(all_ranks);
      }
      for (const auto& each_value : values) {
        const std::vector<std::int32_t> wanted(each_value.size() / 4, expected);
        const auto out = each.gpu.get(each_value);
        EXPECT_EQ(std::memcmp(out.data(), wanted.data(), out.size()), 0) << turn << ", " << out.size();
      }
    }
    ASSERT_TRUE(ended(each.group.barrier()).ok());
  });
}

// The tests that fail a group come last, see direct_test.cpp.

TEST_F(MeshGroup, AReplayThatWaitsTooLongNamesTheRankThatHoldsUpTheOthers) {
  constexpr std::size_t missing = 6;  // whose quad and partner alone wait for it; the others wait for those
  form(all_ranks, std::chrono::seconds(under_sanitizer ? 30 : 12));  // also to form
  std::atomic<std::size_t> released{0};
  run([&](Rank& each) {
    const auto values = each.gpu.allocate(400);
    CapturedGraph graph(each.gpu, [&] {
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::int32, Reduction::sum, each.options())).ok());
    });
    if (each.rank == missing) {
      while (released < all_ranks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else {
      graph.launch();
      each.gpu.synchronize();
      ++released;
      EXPECT_EQ(each.group.failed().code(), Code::deadline_exceeded);
      EXPECT_THAT(each.group.failed().text(), HasSubstr("rank 6"));
      for (const auto* other : {"rank 0", "rank 2", "rank 4", "rank 5", "rank 7"}) {
        EXPECT_THAT(each.group.failed().text(), Not(HasSubstr(other)));
      }
    }
  });
}

// ---- the kernels alone

/// The kernels of all ranks of a hybrid cube mesh, on one GPU. They run there at once, because each has few blocks and
/// a stream of its own.
class MeshKernels : public ::testing::TestWithParam<collectives::cuda::MeshKernel::Kind> {
 protected:
  static constexpr std::size_t half_bytes = 4 * 64 * 1024;
  void SetUp() override {
    const auto missing = conformance::why_no_cuda(1);
    if (!missing.empty()) GTEST_SKIP() << missing;
    const Words zeros(words_of_rank);
    page_.emplace(*cuda::Pinned::lock(*SharedMemory::create(4096), 0));
    for (std::size_t rank = 0; rank < all_ranks; ++rank) {
      auto& gpu = *gpus_.emplace_back(std::make_unique<Gpu>(0, std::size_t{4} << 20));
      halves_.push_back(gpu.allocate(2 * half_bytes).data());
      flags_.push_back(put(gpu, zeros));
    }
  }
  /// A rank's flags, and behind them its epochs.
  using Words = std::vector<unsigned>;
  static constexpr std::size_t words_of_rank = collectives::cuda::flag_words + 256;
  static unsigned* put(Gpu& gpu, const Words& words) {
    auto* const at = gpu.put(std::as_bytes(std::span(words))).data();
    gpu.synchronize();
    return reinterpret_cast<unsigned*>(at);
  }
  /// Returns the arguments of a rank: its quad has the ranks of its parity.
  collectives::cuda::MeshArguments arguments_of(std::size_t rank) {
    collectives::cuda::MeshArguments out{};
    out.side = static_cast<unsigned>(rank % 2);
    out.corner = static_cast<unsigned>(rank / 2);
    out.partner = static_cast<unsigned>(rank ^ 1U);
    for (unsigned other = 0; other < all_ranks; ++other) {
      out.corners[other] = other / 2;
      out.near[other] = other % 2 == rank % 2;
      if (out.near[other]) out.quad[other / 2] = other;
      if (!out.near[other] && other != out.partner) continue;
      out.flags.halves[other] = halves_[other];
      out.flags.flags[other] = flags_[other];
    }
    out.flags.half_bytes = half_bytes;
    out.flags.slot_bytes = half_bytes / 4;
    out.flags.epochs = flags_[rank] + collectives::cuda::flag_words;
    const auto words = cuda::word_at(*page_, 0).device;
    out.flags.abort = reinterpret_cast<const unsigned*>(words);             // NOLINT(performance-no-int-to-ptr)
    out.flags.waits = reinterpret_cast<unsigned*>(words + 64 + rank * 64);  // NOLINT(performance-no-int-to-ptr)
    out.flags.rank = static_cast<unsigned>(rank);
    return out;
  }
  /// Launches it for all ranks.
  void launch(const collectives::cuda::MeshKernel& kernel,
              const std::vector<collectives::cuda::MeshArguments>& arguments) {
    const cuda::DeviceGuard here(0);
    for (std::size_t rank = 0; rank < all_ranks; ++rank) {
      ASSERT_EQ(kernel.launch(arguments[rank], gpus_[rank]->stream), CUDA_SUCCESS);
    }
  }
  std::optional<cuda::Pinned> page_;
  std::vector<std::unique_ptr<Gpu>> gpus_;
  std::vector<std::byte*> halves_;
  std::vector<unsigned*> flags_;
};

TEST_P(MeshKernels, OfEightRanksOnOneGpuGiveTheBitsThatTheHostGives) {
  using collectives::cuda::MeshKernel;
  for (const auto dtype : {DType::float32, DType::float16, DType::bfloat16, DType::int8, DType::complex64}) {
    const auto kernel = MeshKernel::find(0, dtype, Reduction::average, GetParam());
    ASSERT_TRUE(kernel.ok()) << kernel.status().text();
    for (const std::size_t bytes : {std::size_t{16}, std::size_t{1000}, half_bytes / 4, std::size_t{40}}) {
      const auto count = bytes / size_of(dtype);
      const auto inputs = inputs_of(all_ranks, dtype, count);
      std::vector<std::span<std::byte>> outputs;
      std::vector<collectives::cuda::MeshArguments> arguments;
      for (std::size_t rank = 0; rank < all_ranks; ++rank) {
        auto& gpu = *gpus_[rank];
        arguments.push_back(arguments_of(rank));
        arguments[rank].flags.input = gpu.put(inputs[rank], rank % 2 * size_of(dtype)).data();
        outputs.push_back(gpu.allocate(inputs[rank].size(), (rank + 1) % 2 * size_of(dtype)));
        arguments[rank].flags.output = outputs[rank].data();
        arguments[rank].flags.count = count;
        gpu.synchronize();
      }
      launch(*kernel, arguments);
      for (std::size_t rank = 0; rank < all_ranks; ++rank) {
        EXPECT_EQ(gpus_[rank]->get(outputs[rank]), reduced(inputs, dtype, Reduction::average))
            << name_of(dtype) << " of " << bytes << " bytes at rank " << rank;
      }
    }
  }
}

/// A flag that is half a cycle of epochs behind would look ahead, and a block would not wait for it.
TEST_P(MeshKernels, FlagsThatLaunchesDoNotWriteKeepUpWithTheEpochs) {
  using namespace collectives::cuda;
  constexpr unsigned start = (1U << 28) - 2, ahead = start + 7, unused_block = 5;
  const auto kernel = MeshKernel::find(0, DType::int32, Reduction::sum, GetParam());
  ASSERT_TRUE(kernel.ok()) << kernel.status().text();
  Words words(words_of_rank);
  std::fill_n(words.begin() + flag_words, most_flag_blocks, start);
  words[unused_block * most_ranks] = ahead;  // rank 0 has begun a launch of more blocks
  std::vector<MeshArguments> arguments;
  for (std::size_t rank = 0; rank < all_ranks; ++rank) flags_[rank] = put(*gpus_[rank], words);
  for (std::size_t rank = 0; rank < all_ranks; ++rank) {
    auto& gpu = *gpus_[rank];
    arguments.push_back(arguments_of(rank));
    arguments[rank].flags.input = gpu.put(std::vector<std::byte>(16)).data();
    arguments[rank].flags.output = gpu.allocate(16).data();
    arguments[rank].flags.count = 4;
    gpu.synchronize();
  }
  launch(*kernel, arguments);
  for (std::size_t rank = 0; rank < all_ranks; ++rank) {
    const auto bytes = gpus_[rank]->get({reinterpret_cast<std::byte*>(flags_[rank]), words_of_rank * sizeof(unsigned)});
    std::memcpy(words.data(), bytes.data(), bytes.size());
    const auto epoch = words[flag_words];
    EXPECT_GT(epoch, start);
    EXPECT_EQ(words[unused_block * most_ranks], ahead);
    for (unsigned block = 0; block < most_flag_blocks; ++block) {
      EXPECT_EQ(words[flag_words + block], epoch) << block;
      for (unsigned from = 0; from < all_ranks; ++from) EXPECT_GE(words[block * most_ranks + from], start) << from;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shots, MeshKernels,
                         ::testing::Values(collectives::cuda::MeshKernel::Kind::one_shot,
                                           collectives::cuda::MeshKernel::Kind::two_shot),
                         [](const auto& each) {
                           return each.param == collectives::cuda::MeshKernel::Kind::one_shot ? "one" : "two";
                         });

}  // namespace
}  // namespace tensorferry::testing
