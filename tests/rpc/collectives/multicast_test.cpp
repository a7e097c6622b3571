// Operations of a group whose reductions a switch does, and what the ranks do if one of them has no multicast. Each
// rank is on a GPU of its own. Also the parts: the box through which a descriptor passes, and the emulated driver's
// rules.
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "base/environment.h"
#include "base/shared_memory.h"
#include "channels/cuda/device.h"
#include "rpc/collectives/cuda/descriptor_box.h"
#include "rpc/collectives/cuda/multicast_driver.h"
#include "rpc/collectives/gpu_multicast.h"
#include "tests/rpc/collectives/direct_ranks.h"

namespace tensorferry::testing {
namespace {

using collectives::Operation;
using collectives::RawGroup;
using collectives::switch_reduction;
using collectives::SwitchReduction;
using collectives::cuda::DescriptorBox;
using collectives::cuda::MulticastDriver;
using cuda::api;
using ::testing::HasSubstr;
using ::testing::Not;

// As the program was started: only who turns multicast on lets real GPUs use it.
const bool turned_on = environment::cuda_multicast.value() == "1";

constexpr std::string_view by_switch = "; the switch reduces by multicast";
constexpr std::string_view not_by_switch = "; the switch reduces nothing (multicast), because ";

/// Ranks whose GPUs have multicast, if the machine's can: on a real one its administrator may have turned it off.
class Multicast : public Direct {
 protected:
  static void SetUpTestSuite() { ::setenv("EMULATED_GPUS", "4", 1); }
  void SetUp() override {
    if (const auto missing = conformance::why_no_cuda(2); !missing.empty()) GTEST_SKIP() << missing;
    if (!turned_on && !is_emulated()) GTEST_SKIP() << "TENSORFERRY_CUDA_MULTICAST is not 1";
    ::setenv("TENSORFERRY_CUDA_MULTICAST", "1", 1);
    if (is_emulated()) {
      ::unsetenv("NCCL_NVLS_ENABLE");
      ::unsetenv("EMULATED_GPU_MULTICAST_FAILS");
      ::setenv("EMULATED_GPU_MULTICAST", "1", 1);
      ::setenv("EMULATED_MACHINE", "dgx-h100", 1);
    }
    for (int device = 0; device < cuda::devices(); ++device) {
      if (const auto why = MulticastDriver::why_not(device); !why.empty()) GTEST_SKIP() << why;
    }
  }
  std::size_t ranks() { return static_cast<std::size_t>(std::min(cuda::devices(), 4)); }
  static std::string explain(const Rank& each, std::size_t bytes) {
    return each.group.explain(Operation::all_reduce, bytes);
  }
};

struct Reduced {
  std::size_t ranks;
  std::string algorithm;
};
class MulticastReductions : public Multicast, public ::testing::WithParamInterface<Reduced> {};

/// The emulated switch adds the last rank's elements first.
Bytes reduced_by_switch(std::vector<Bytes> inputs, DType dtype, const ReduceOp& op) {
  std::reverse(inputs.begin(), inputs.end());
  return reduced(inputs, dtype, op);
}

TEST_P(MulticastReductions, OfEveryDtypeAreThoseOfTheSwitchOrOfKernels) {
  if (!is_emulated()) GTEST_SKIP() << "a real switch adds in an order of its own";
  const auto count_of_ranks = GetParam().ranks;
  const bool two_shots = GetParam().algorithm == "two_shot";
  form(count_of_ranks, std::chrono::seconds(40), GetParam().algorithm);
  run([&](Rank& each) {
    EXPECT_THAT(explain(each, 1000), HasSubstr(std::string(by_switch)));
    for (const auto dtype : dtypes) {
      for (int kind = 0; kind < static_cast<int>(Reduction::custom); ++kind) {
        ReduceOp op(static_cast<Reduction>(kind));
        if (op.kind == Reduction::premultiplied_sum) op.factor = 0.375;
        if (!collectives::check_reduction(op, dtype).ok()) continue;
        const bool reversed = two_shots && switch_reduction(dtype, op.kind) == SwitchReduction::rounded;
        for (const std::size_t count : {1, 37, 4099}) {
          const auto inputs = inputs_of(count_of_ranks, dtype, count);
          const auto offset = each.rank % 2 * size_of(dtype);
          const auto in = each.gpu.put(inputs[each.rank], offset);
          const auto out = each.gpu.allocate(in.size(), size_of(dtype) - offset);
          const auto status = ended(each.group.all_reduce(in, out, dtype, op, each.options()));
          ASSERT_TRUE(status.ok()) << status.text();
          EXPECT_EQ(each.gpu.get(out), reversed ? reduced_by_switch(inputs, dtype, op) : reduced(inputs, dtype, op))
              << name_of(dtype) << " " << name_of(op.kind) << " of " << count;
          EXPECT_EQ(each.gpu.get(in), inputs[each.rank]);
          each.gpu.forget();
        }
      }
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Ranks, MulticastReductions,
                         ::testing::Values(Reduced{2, "one_shot"}, Reduced{2, "two_shot"}, Reduced{4, "one_shot"},
                                           Reduced{4, "two_shot"}),
                         [](const auto& each) {
                           return std::to_string(each.param.ranks) + "_" + each.param.algorithm;
                         });

TEST_F(Multicast, SumsOfFloatsHaveTheSameBitsAtEveryRankAndAreNearThoseOfTheHost) {
  form(ranks());
  std::mutex mutex;
  std::map<std::size_t, Bytes> first;  // what one rank got, by count
  run([&](Rank& each) {
    const auto all = each.group.size();
    for (const std::size_t count : {100, 70'000, 300'001, 3'000'000}) {
      const auto inputs = inputs_of(all, DType::float32, count);
      const auto values = each.gpu.put(inputs[each.rank], each.rank * 4);
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::float32, Reduction::sum, each.options())).ok());
      const auto out = each.gpu.get(values), expected = reduced(inputs, DType::float32, Reduction::sum);
      for (std::size_t i = 0; i < count; i += 101) {
        float found = 0, wanted = 0;
        std::memcpy(&found, out.data() + 4 * i, sizeof found);
        std::memcpy(&wanted, expected.data() + 4 * i, sizeof wanted);
        ASSERT_NEAR(found, wanted, 1e-5) << i << " of " << count;
      }
      each.gpu.forget();
      const std::lock_guard lock(mutex);
      EXPECT_EQ(first.try_emplace(count, out).first->second, out) << count;
    }
  });
}

TEST_F(Multicast, OperationsByTheSwitchAndByKernelsFollowOneAnother) {
  form(ranks());
  run([&](Rank& each) {
    const auto all = each.group.size();
    // Below and above the crossing, in several chunks, and with other numbers of blocks in turns. Products are of
    // kernels.
    for (const std::size_t count : {1, 80'000, 3, 300'001, 37, 4'400'001, 100, 70'000, 16, 4099, 65'536, 5}) {
      const auto inputs = inputs_of(all, DType::int32, count);
      const auto offset = (each.rank + count) % 4 * 4;
      const auto in = each.gpu.put(inputs[each.rank], offset);
      const auto out = count > 1'000'000 ? in : each.gpu.allocate(in.size(), 12 - offset);
      for (const auto op : {Reduction::sum, Reduction::product, Reduction::max}) {
        if (op != Reduction::sum && count > 1'000'000) continue;
        ASSERT_TRUE(ended(each.group.all_reduce(in, out, DType::int32, op, each.options())).ok());
        EXPECT_EQ(each.gpu.get(out), reduced(inputs, DType::int32, op)) << count;
      }
      each.gpu.forget();
    }
  });
}

TEST_F(Multicast, ManyOperationsAreEnqueuedBeforeTheFirstEnds) {
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
    std::int32_t first = 0;
    std::memcpy(&first, each.gpu.get(values).data(), sizeof first);
    EXPECT_EQ(first, expected);
  });
}

TEST_F(Multicast, AGraphOfOperationsIsReplayedBetweenOthers) {
  form(ranks());
  run([&](Rank& each) {
    replay_between_others(each, {100, 100'000, 7, 4'300'000}, 4);  // the last one in two chunks
  });
}

TEST_F(Multicast, ExplainSaysWhatTheSwitchReduces) {
  form(ranks());
  run([&](Rank& each) {
    EXPECT_THAT(explain(each, 1000), HasSubstr("kernels reduce floating-point numbers in one_shot"));
    EXPECT_THAT(explain(each, 1 << 20), HasSubstr("sums of float16, bfloat16, float32"));
    EXPECT_THAT(explain(each, 1 << 20),
                HasSubstr("kernels do other reductions, because the switch has no instruction"));
    EXPECT_THAT(each.group.explain(Operation::broadcast, 1000), Not(HasSubstr("multicast")));
  });
}

// ---- ranks that have no multicast

class MulticastRefusals : public Multicast {
 protected:
  /// All ranks give `reason`, and the kernels reduce.
  void expect_kernels(const std::string& reason) {
    kept.push_back({std::move(world), std::move(directs), std::move(gpus)});
    form(2);
    run([&](Rank& each) {
      EXPECT_THAT(explain(each, 1 << 20), HasSubstr(std::string(not_by_switch) + reason));
      const auto inputs = inputs_of(2, DType::float32, 100'000);
      const auto values = each.gpu.put(inputs[each.rank]);
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::float32, Reduction::sum, each.options())).ok());
      EXPECT_EQ(each.gpu.get(values), reduced(inputs, DType::float32, Reduction::sum));
    });
  }
  void TearDown() override {
    Multicast::TearDown();
    kept.clear();
  }

  /// Groups that are done with. A driver that frees their memory lets no rank of the process launch a kernel meanwhile.
  struct Kept {
    std::unique_ptr<GroupWorld> world;
    std::vector<std::shared_ptr<collectives::cuda::DirectGroup>> directs;
    std::vector<std::unique_ptr<Gpu>> gpus;
  };
  std::vector<Kept> kept;
};

TEST_F(MulticastRefusals, OfOneRankAtEachStepMakeAllUseKernels) {
  if (!is_emulated()) GTEST_SKIP() << "needs a driver that fails";
  const std::vector<std::pair<const char*, std::string>> steps{
      {"support 1", R"(rank 1 ("rank1"): the GPU or its driver has no multicast)"},
      {"create 0", R"(rank 0 ("rank0"): creating a multicast object failed)"},
      {"export 0", R"(rank 0 ("rank0"): exporting the multicast object failed)"},
      {"import 1", R"(rank 1 ("rank1"): importing the multicast object failed)"},
      {"add 0", R"(rank 0 ("rank0"): adding the GPU to the multicast object failed)"},
      {"add 1", R"(rank 1 ("rank1"): adding the GPU to the multicast object failed)"},
      {"bind 1", R"(rank 1 ("rank1"): binding memory to the multicast object failed)"},
      {"map 0", R"(rank 0 ("rank0"): mapping the multicast object failed)"},
  };
  for (const auto& [step, reason] : steps) {
    SCOPED_TRACE(step);
    ::setenv("EMULATED_GPU_MULTICAST_FAILS", step, 1);
    expect_kernels(reason);
  }
  ::unsetenv("EMULATED_GPU_MULTICAST_FAILS");
}

TEST_F(MulticastRefusals, OfTheUserAndOfTheAdministratorAreNamed) {
  ::unsetenv("TENSORFERRY_CUDA_MULTICAST");
  expect_kernels(R"(rank 0 ("rank0"): TENSORFERRY_CUDA_MULTICAST=1 turns it on)");
  ::setenv("TENSORFERRY_CUDA_MULTICAST", "1", 1);
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);
  if (is_emulated()) ::setenv("EMULATED_GPU_MULTICAST_FAILS", "support 0", 1);  // the driver is not even asked
  expect_kernels(R"(rank 0 ("rank0"): NCCL_NVLS_ENABLE=0 says that multicast is turned off on this host)");
  ::unsetenv("EMULATED_GPU_MULTICAST_FAILS");
  ::unsetenv("NCCL_NVLS_ENABLE");
}

TEST_F(MulticastRefusals, OfRanksThatShareAGpuNeedNoDriver) {
  form(2, std::chrono::seconds(40), "by_one");
  run([&](Rank& each) { EXPECT_THAT(explain(each, 1000), HasSubstr("because ranks share a GPU")); });
}

// The test that fails a group comes last, as in direct_test.cpp.
TEST_F(Multicast, AKernelThatWaitsForARankIsReleasedWhenTheGroupFails) {
  form(2);
  std::atomic<bool> released{false};
  run([&](Rank& each) {
    const auto values = each.gpu.allocate(400'000);
    CapturedGraph graph(each.gpu, [&] {
      ASSERT_TRUE(ended(each.group.all_reduce(values, values, DType::float32, Reduction::sum, each.options())).ok());
    });
    if (each.rank == 0) {  // rank 1 launches no graph
      graph.launch();
      each.gpu.synchronize();
      released = true;
      EXPECT_EQ(each.group.failed().code(), Code::cancelled);
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      EXPECT_FALSE(released);
      each.group.abort("the test says so");
      while (!released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

// ---- the box

std::uint64_t inode_of(int descriptor) {
  struct stat file {};
  return ::fstat(descriptor, &file) == 0 ? file.st_ino : 0;
}
std::chrono::steady_clock::time_point soon() {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(30);
}

TEST(DescriptorBoxes, GiveTheDescriptorThatWasSentToThem) {
  auto one = *DescriptorBox::open(), other = *DescriptorBox::open();
  const auto sent = *SharedMemory::create(4096)->share();
  ASSERT_TRUE(DescriptorBox::send(sent.get(), one.address()).ok());
  const auto taken = one.take(soon());
  ASSERT_TRUE(taken.ok()) << taken.status().text();
  EXPECT_EQ(inode_of(taken->get()), inode_of(sent.get()));
  EXPECT_EQ(other.take(soon()).status().code(), Code::channel_unavailable);
  EXPECT_EQ(one.take(soon()).status().code(), Code::channel_unavailable);
}

TEST(DescriptorBoxes, IgnoreWhatDoesNotKnowTheirWord) {
  auto box = *DescriptorBox::open();
  const auto sent = *SharedMemory::create(4096)->share();
  auto wrong = box.address();
  ++wrong.word;
  const FileDescriptor junk(::dup(STDIN_FILENO));
  ASSERT_TRUE(DescriptorBox::send(junk.get(), wrong).ok());
  ASSERT_TRUE(DescriptorBox::send(junk.get(), wrong).ok());
  EXPECT_FALSE(box.take(soon()).ok());
  ASSERT_TRUE(DescriptorBox::send(junk.get(), wrong).ok());
  ASSERT_TRUE(DescriptorBox::send(sent.get(), box.address()).ok());
  const auto taken = box.take(soon());
  ASSERT_TRUE(taken.ok());
  EXPECT_EQ(inode_of(taken->get()), inode_of(sent.get()));
}

TEST(DescriptorBoxes, ThatAreGoneAreTheReason) {
  DescriptorBox::Address address;
  { address = DescriptorBox::open()->address(); }
  const auto status = DescriptorBox::send(STDIN_FILENO, address);
  EXPECT_EQ(status.code(), Code::channel_unavailable);
  EXPECT_THAT(status.text(), HasSubstr("sending a descriptor"));
}

// ---- the rules of the emulated driver, as cuda.h has them

class EmulatedMulticast : public ::testing::Test {
 protected:
  static constexpr std::size_t unit = std::size_t{2} << 20;
  void SetUp() override {
    ::setenv("EMULATED_GPU_MULTICAST", "1", 1);
    if (const auto missing = conformance::why_no_cuda(2); !missing.empty()) GTEST_SKIP() << missing;
    if (!is_emulated()) GTEST_SKIP() << "needs emulated GPUs";
    ::setenv("TENSORFERRY_CUDA_MULTICAST", "1", 1);
    ASSERT_EQ(MulticastDriver::why_not(0), "");
    here = std::make_unique<cuda::DeviceGuard>(0);
  }
  static CUmulticastObjectProp object_of(std::size_t bytes) {
    return {.numDevices = 2, .size = bytes, .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, .flags = 0};
  }
  CUmemGenericAllocationHandle object() {
    const auto wanted = object_of(2 * unit);
    CUmemGenericAllocationHandle out = 0;
    EXPECT_EQ(driver.create(&out, &wanted), CUDA_SUCCESS);
    return out;
  }
  static CUmemGenericAllocationHandle memory(int device, bool shareable = true) {
    CUmemAllocationProp wanted{};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    wanted.requestedHandleTypes = shareable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
    CUmemGenericAllocationHandle out = 0;
    EXPECT_EQ(api()->mem_create(&out, 2 * unit, &wanted, 0), CUDA_SUCCESS);
    return out;
  }
  static CUdeviceptr reserve(std::size_t bytes) {
    CUdeviceptr out = 0;
    EXPECT_EQ(api()->mem_address_reserve(&out, bytes, unit, 0, 0), CUDA_SUCCESS);
    EXPECT_EQ(out % unit, 0);
    return out;
  }
  static CUresult access(CUdeviceptr at, int device) {
    CUmemAccessDesc wanted{};
    wanted.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    wanted.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return api()->mem_set_access(at, 2 * unit, &wanted, 1);
  }
  std::unique_ptr<cuda::DeviceGuard> here;
  const MulticastDriver& driver = MulticastDriver::of_this_process();
};

TEST_F(EmulatedMulticast, ObjectsHaveWholeUnitsAndTwoDevicesOrMore) {
  CUmemGenericAllocationHandle out = 0;
  auto wanted = object_of(unit + 4096);
  EXPECT_EQ(driver.create(&out, &wanted), CUDA_ERROR_INVALID_VALUE);
  wanted = object_of(unit);
  wanted.numDevices = 1;
  EXPECT_EQ(driver.create(&out, &wanted), CUDA_ERROR_INVALID_VALUE);
  std::size_t found = 0;
  wanted.numDevices = 2;
  EXPECT_EQ(driver.get_granularity(&found, &wanted, CU_MULTICAST_GRANULARITY_MINIMUM), CUDA_SUCCESS);
  EXPECT_EQ(found, unit);
}

TEST_F(EmulatedMulticast, BindsAndMappingsComeWhenAllDevicesHaveBeenAdded) {
  const auto made = object(), own = memory(0);
  const auto at = reserve(2 * unit);
  ASSERT_EQ(driver.add_device(made, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver.add_device(made, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.bind_memory(made, 0, own, 0, 2 * unit, 0), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(api()->mem_map(at, 2 * unit, 0, made, 0), CUDA_ERROR_NOT_READY);
  ASSERT_EQ(driver.add_device(made, 1), CUDA_SUCCESS);
  EXPECT_EQ(driver.bind_memory(made, 0, own, 0, unit + 4096, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.bind_memory(made, 0, own, 0, 4 * unit, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.bind_memory(made, 0, memory(0, false), 0, 2 * unit, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.bind_memory(made, 0, own, 0, 2 * unit, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver.bind_memory(made, 0, memory(0), 0, 2 * unit, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(api()->mem_map(at + 4096, unit, 0, made, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(api()->mem_map(at, 2 * unit, 0, made, 0), CUDA_SUCCESS);
  EXPECT_EQ(access(at, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver.unbind(made, 0, 0, 2 * unit), CUDA_SUCCESS);
  EXPECT_EQ(driver.unbind(made, 0, 0, 2 * unit), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(EmulatedMulticast, AddressesAreNotForCopies) {
  const auto made = object();
  ASSERT_EQ(driver.add_device(made, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver.add_device(made, 1), CUDA_SUCCESS);
  const auto at = reserve(2 * unit);
  ASSERT_EQ(api()->mem_map(at, 2 * unit, 0, made, 0), CUDA_SUCCESS);
  ASSERT_EQ(access(at, 0), CUDA_SUCCESS);
  const Gpu gpu(0);
  std::uint64_t word = 0;
  EXPECT_EQ(api()->memcpy_async(cuda::address_of(&word), at, sizeof word, gpu.stream), CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST_F(EmulatedMulticast, ADescriptorLeadsToTheSameObject) {
  const auto made = object();
  int descriptor = -1;
  ASSERT_EQ(api()->mem_export(&descriptor, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), CUDA_SUCCESS);
  const FileDescriptor owner(descriptor);
  CUmemGenericAllocationHandle imported = 0;
  auto* const handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor));  // NOLINT
  ASSERT_EQ(api()->mem_import(&imported, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), CUDA_SUCCESS);
  ASSERT_EQ(driver.add_device(imported, 1), CUDA_SUCCESS);
  EXPECT_EQ(driver.add_device(made, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.add_device(made, 0), CUDA_SUCCESS);
}

}  // namespace
}  // namespace tensorferry::testing
