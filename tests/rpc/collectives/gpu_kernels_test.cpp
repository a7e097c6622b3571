#include <gmock/gmock.h>

#include <functional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "rpc/collectives/cuda/compiler.h"
#include "rpc/collectives/reduce.h"
#include "tests/agent/patience.h"

namespace tensorferry::testing {
namespace {

using collectives::cuda::compile_kernels;
using collectives::cuda::kernel_types;
using collectives::cuda::KernelProgram;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Calls `body` with each number of a dtype and each reduction.
void for_all(const std::function<void(DType, Reduction)>& body) {
  for (int dtype = 0; dtype < 64; ++dtype) {
    for (int kind = 0; kind <= static_cast<int>(Reduction::last); ++kind) {
      body(static_cast<DType>(dtype), static_cast<Reduction>(kind));
    }
  }
}

TEST(GpuKernels, AreDefinedForTheSameReductionsAsThoseOfTheHost) {
  for_all([](DType dtype, Reduction reduction) {
    EXPECT_EQ(kernel_types(dtype, reduction).element.empty(), collectives::kernel_of(dtype, reduction) == nullptr)
        << "dtype " << static_cast<int>(dtype) << ", reduction " << static_cast<int>(reduction);
  });
}

TEST(GpuKernels, AreCompiledByTheNvrtcOfTorchAndByNoneThatIsNewerThanTheDriver) {
  using collectives::cuda::nvrtc_versions;
  EXPECT_THAT(nvrtc_versions(0, 0), ElementsAre(13, 12));
  EXPECT_THAT(nvrtc_versions(12, 13), ElementsAre(12, 13));
  EXPECT_THAT(nvrtc_versions(13, 14), ElementsAre(13, 12));
  EXPECT_THAT(nvrtc_versions(12, 12), ElementsAre(12));
  EXPECT_THAT(nvrtc_versions(0, 12), ElementsAre(12));
  EXPECT_THAT(nvrtc_versions(14, 14), ElementsAre(13, 12));
  EXPECT_THAT(nvrtc_versions(0, 11), IsEmpty());
}

/// Returns why nothing is compiled here; empty: it is. NVRTC needs no GPU.
std::string why_not() {
  if (under_sanitizer) return "NVRTC is not instrumented, and takes minutes";
  const auto first = compile_kernels(KernelProgram::reduce, kernel_types(DType::float32, Reduction::sum), 90, 2);
  const auto text = first.ok() ? std::string() : first.status().text();
  return text.find("there is no NVRTC") == std::string::npos ? std::string() : text;
}

using Wanted = std::function<bool(DType, Reduction)>;
Wanted only(Reduction wanted) {
  return [wanted](DType, Reduction reduction) { return reduction == wanted; };
}

/// Compiles a program, or one kernel of it, for every dtype and reduction, or for those that are `wanted`.
void expect_to_compile(KernelProgram program, unsigned ranks, std::string_view kernel = {}, const Wanted& wanted = {}) {
  if (const auto why = why_not(); !why.empty()) GTEST_SKIP() << why;
  std::set<std::pair<std::string_view, std::string_view>> compiled;
  for_all([&](DType dtype, Reduction reduction) {
    if (wanted && !wanted(dtype, reduction)) return;
    const auto types = kernel_types(dtype, reduction);
    if (types.element.empty() || !compiled.emplace(types.element, types.combination).second) return;
    const auto image = compile_kernels(program, types, 90, ranks, kernel);
    EXPECT_TRUE(image.ok()) << types.element << " " << types.combination << ": " << image.status().text();
  });
}

// In soak all pairs.
TEST(GpuKernels, CompileForEveryDtypeAndReduction) {
  expect_to_compile(KernelProgram::reduce, 2, {}, [](DType dtype, Reduction reduction) {
    return is_soak || reduction == Reduction::sum || dtype == DType::float32 || dtype == DType::int32;
  });
}

// The other kernels reduce and copy by the same functions. All pairs take minutes.
TEST(GpuKernels, ThatMeetByFlagsCompileForEveryReduction) {
  expect_to_compile(KernelProgram::flags, 2, "tensorferry_two_shot", [](DType dtype, Reduction reduction) {
    // Floats have no reductions of bits.
    const auto of_floats = kernel_types(DType::float32, reduction);
    const auto once = of_floats.element.empty() ? DType::int32 : DType::float32;
    return is_soak || dtype == once;
  });
}
TEST(GpuKernels, ThatMeetByFlagsCompileForEveryDtype) {
  expect_to_compile(KernelProgram::flags, 2, {}, only(Reduction::sum));
}

TEST(GpuKernels, AProgramHasTheKernelThatIsAskedForAndNoOther) {
  if (const auto why = why_not(); !why.empty()) GTEST_SKIP() << why;
  const std::vector<std::pair<KernelProgram, std::string>> kernels{
      {KernelProgram::reduce, "tensorferry_reduce"},       {KernelProgram::flags, "tensorferry_one_shot"},
      {KernelProgram::flags, "tensorferry_two_shot"},      {KernelProgram::flags, "tensorferry_exchange"},
      {KernelProgram::flags, "tensorferry_reduce_pieces"},
  };
  for (const auto& [program, name] : kernels) {
    const auto image = compile_kernels(program, kernel_types(DType::float32, Reduction::sum), 90, 8, name);
    ASSERT_TRUE(image.ok()) << image.status().text();
    const std::string_view text(image->data(), image->size());
    for (const auto& [ignored, each] : kernels) {
      EXPECT_EQ(text.find(".text." + each + '\0') != std::string_view::npos, each == name) << name << ", " << each;
    }
  }
}

TEST(GpuKernels, AGpuThatTheCompilerDoesNotKnowIsTheReason) {
  const auto image = compile_kernels(KernelProgram::reduce, kernel_types(DType::float32, Reduction::sum), 12, 2);
  ASSERT_FALSE(image.ok());
  EXPECT_EQ(image.status().code(), Code::channel_unavailable);
  EXPECT_THAT(image.status().text(), HasSubstr("NVRTC"));
}

}  // namespace
}  // namespace tensorferry::testing
