// The kernels that meet by flags, alone: those of all ranks run on one GPU, real or emulated.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "base/shared_memory.h"
#include "channels/cuda/pinned.h"
#include "rpc/collectives/cuda/reductions.h"
#include "tests/rpc/collectives/direct_ranks.h"

namespace tensorferry::testing {
namespace {

using collectives::cuda::FlagArguments;
using collectives::cuda::FlagKernel;

constexpr std::size_t all_ranks = 8;

/// The kernels of all ranks, on one GPU. They run there at once, because each has few blocks and a stream of its own.
class FlagKernels : public ::testing::TestWithParam<FlagKernel::Kind> {
 protected:
  static constexpr std::size_t half_bytes = 64 * 1024;
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
  FlagArguments arguments_of(std::size_t rank) {
    FlagArguments out{};
    for (std::size_t other = 0; other < all_ranks; ++other) {
      out.halves[other] = halves_[other];
      out.flags[other] = flags_[other];
    }
    out.half_bytes = half_bytes;
    out.epochs = flags_[rank] + collectives::cuda::flag_words;
    const auto words = cuda::word_at(*page_, 0).device;
    out.abort = reinterpret_cast<const unsigned*>(words);             // NOLINT(performance-no-int-to-ptr)
    out.waits = reinterpret_cast<unsigned*>(words + 64 + rank * 64);  // NOLINT(performance-no-int-to-ptr)
    out.rank = static_cast<unsigned>(rank);
    return out;
  }
  /// Launches it for all ranks.
  void launch(const FlagKernel& kernel, const std::vector<FlagArguments>& arguments) {
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

TEST_P(FlagKernels, OfEightRanksOnOneGpuGiveTheBitsThatTheHostGives) {
  for (const auto dtype : {DType::float32, DType::float16, DType::bfloat16, DType::int8, DType::complex64}) {
    const auto kernel = FlagKernel::find(0, dtype, Reduction::average, all_ranks, GetParam());
    ASSERT_TRUE(kernel.ok()) << kernel.status().text();
    for (const std::size_t bytes : {std::size_t{16}, std::size_t{1000}, half_bytes, std::size_t{40}}) {
      const auto count = bytes / size_of(dtype);
      const auto inputs = inputs_of(all_ranks, dtype, count);
      std::vector<std::span<std::byte>> outputs;
      std::vector<FlagArguments> arguments;
      for (std::size_t rank = 0; rank < all_ranks; ++rank) {
        auto& gpu = *gpus_[rank];
        arguments.push_back(arguments_of(rank));
        arguments[rank].input = gpu.put(inputs[rank], rank % 2 * size_of(dtype)).data();
        outputs.push_back(gpu.allocate(inputs[rank].size(), (rank + 1) % 2 * size_of(dtype)));
        arguments[rank].output = outputs[rank].data();
        arguments[rank].count = count;
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
TEST_P(FlagKernels, FlagsThatLaunchesDoNotWriteKeepUpWithTheEpochs) {
  using namespace collectives::cuda;
  constexpr unsigned start = (1U << 28) - 2, ahead = start + 7, unused_block = 5;
  const auto kernel = FlagKernel::find(0, DType::int32, Reduction::sum, all_ranks, GetParam());
  ASSERT_TRUE(kernel.ok()) << kernel.status().text();
  Words words(words_of_rank);
  std::fill_n(words.begin() + flag_words, most_flag_blocks, start);
  words[unused_block * most_ranks] = ahead;  // rank 0 has begun a launch of more blocks
  std::vector<FlagArguments> arguments;
  for (std::size_t rank = 0; rank < all_ranks; ++rank) flags_[rank] = put(*gpus_[rank], words);
  for (std::size_t rank = 0; rank < all_ranks; ++rank) {
    auto& gpu = *gpus_[rank];
    arguments.push_back(arguments_of(rank));
    arguments[rank].input = gpu.put(std::vector<std::byte>(16)).data();
    arguments[rank].output = gpu.allocate(16).data();
    arguments[rank].count = 4;
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

INSTANTIATE_TEST_SUITE_P(Shots, FlagKernels, ::testing::Values(FlagKernel::Kind::one_shot, FlagKernel::Kind::two_shot),
                         [](const auto& each) { return each.param == FlagKernel::Kind::one_shot ? "one" : "two"; });

}  // namespace
}  // namespace tensorferry::testing
