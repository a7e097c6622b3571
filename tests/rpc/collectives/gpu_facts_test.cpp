// The facts about GPUs that NVML and the driver tell: those of each machine that the emulated NVML replays, and those
// of real GPUs.
#include "rpc/collectives/cuda/gpu_facts.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <string>

#include "channels/cuda/device.h"
#include "rpc/collectives/cuda/nvml.h"
#include "tests/rpc/collectives/gpu.h"
#include "tests/rpc/collectives/machine_facts.h"

namespace tensorferry::testing {
namespace {

using collectives::GpuTopology;
using collectives::JoinedGpus;
using collectives::LinkEnd;
using collectives::cuda::facts_between;
using collectives::cuda::facts_of;
using ::testing::HasSubstr;

/// Returns what the ranks would decide that have these GPUs of this process.
JoinedGpus joined_here(int devices) {
  std::vector<collectives::GpuFacts> gpus;
  std::vector<collectives::PairFacts> pairs;
  for (int device = 0; device < devices; ++device) gpus.push_back(facts_of(device));
  for (int device = 0; device < devices; ++device) {
    for (const auto& other : gpus)
      pairs.push_back(facts_between(device, gpus[static_cast<std::size_t>(device)], other));
  }
  return collectives::joined_gpus(gpus, pairs);
}

TEST(GpuFacts, AreReadFromNvmlAsTheyAreOnEachMachine) {
  if (!is_emulated()) GTEST_SKIP() << "needs the emulated NVML";
  for (const auto& machine : emulated::machines()) {
    SCOPED_TRACE(machine.name);
    ::setenv("EMULATED_MACHINE", std::string(machine.name).c_str(), 1);
    std::vector<std::size_t> all;
    for (std::size_t gpu = 0; gpu < machine.addresses.size(); ++gpu) all.push_back(gpu);
    const auto expected = facts_on(machine, all);
    for (const auto& each : expected.gpus) {
      collectives::GpuFacts found;
      found.pci = each.pci;
      collectives::cuda::add_facts_of_nvml(found);
      EXPECT_EQ(found.name.text(), machine.gpu);
      EXPECT_EQ(found.unknown.text(), each.unknown.text());
      for (std::size_t link = 0; link < found.links.size(); ++link) {
        EXPECT_EQ(found.links.at(link).end, each.links.at(link).end) << link;
        EXPECT_EQ(found.links.at(link).at, each.links.at(link).at) << link;
      }
      for (std::size_t other = 0; other < all.size(); ++other) {
        if (expected.gpus[other].pci == each.pci) continue;
        const auto& way = expected.pairs[(&each - expected.gpus.data()) * all.size() + other];
        const auto asked = collectives::cuda::pair_facts_of_nvml(each.pci, expected.gpus[other].pci);
        EXPECT_EQ(asked.peer_access, way.peer_access);
        EXPECT_EQ(asked.common_ancestor, way.common_ancestor);
      }
    }
  }
}

TEST(GpuFacts, SayWhyNvmlDoesNotTellThem) {
  if (!is_emulated()) GTEST_SKIP() << "needs the emulated NVML";
  ::unsetenv("EMULATED_MACHINE");
  EXPECT_EQ(facts_of(1).unknown.text(), "NVML does not find the GPU 00000000:02:00.0: Not Found");
  EXPECT_EQ(facts_of(1).name.text(), "emulated GPU");
  EXPECT_THAT(facts_of(77).unknown.text(), HasSubstr("the driver does not know the GPU"));
  EXPECT_EQ(joined_here(2).topology, GpuTopology::unknown);
}

TEST(GpuFacts, OfThisProcessLeadToTheTopologyOfTheMachine) {
  if (!is_emulated()) GTEST_SKIP() << "needs the emulated NVML";
  const auto joined_on = [](const char* name) {
    ::setenv("EMULATED_MACHINE", name, 1);
    return joined_here(2).topology;
  };
  EXPECT_EQ(joined_on("dgx-h100"), GpuTopology::nv_switch);
  EXPECT_EQ(joined_on("hgx-a100-4"), GpuTopology::full_mesh);
  EXPECT_EQ(joined_on("dgx-1v"), GpuTopology::full_mesh);
  EXPECT_EQ(joined_on("workstation"), GpuTopology::pcie);
  EXPECT_EQ(joined_on("cloud-a100"), GpuTopology::nv_switch);
  EXPECT_EQ(joined_on("mig"), GpuTopology::unknown);  // the emulated driver gives peer access, and MIG hides the links
}

TEST(RealGpus, HaveKnownFactsThatAgreeWithTheDriver) {
  if (const auto missing = conformance::why_no_cuda(1); !missing.empty()) GTEST_SKIP() << missing;
  if (is_emulated()) GTEST_SKIP() << "needs real GPUs";
  for (int device = 0; device < cuda::devices(); ++device) {
    const auto facts = facts_of(device);
    std::size_t up = 0;
    for (const auto& link : facts.links) up += link.end == LinkEnd::nothing ? 0 : 1;
    std::cout << "GPU " << device << ": " << facts.name.text() << " at " << text_of(facts.pci) << ", " << up
              << " NVLinks are up" << (facts.unknown.text().empty() ? "" : "; unknown: " + facts.unknown.text())
              << "\n";
    EXPECT_FALSE(facts.name.text().empty());
    EXPECT_EQ(std::string(facts.uuid.data(), facts.uuid.size()), cuda::uuid_of(device));
    if (facts.unknown.text().find("MIG") == std::string::npos) {
      EXPECT_EQ(facts.unknown.text(), "") << "a driver installs NVML, unless a container lacks it";
    }
  }
}

TEST(RealGpus, AreJoinedByNvlinkIfTheDriverSaysSo) {
  if (const auto missing = conformance::why_no_cuda(2); !missing.empty()) GTEST_SKIP() << missing;
  if (is_emulated()) GTEST_SKIP() << "needs real GPUs";
  const auto joined = joined_here(2);
  std::cout << "GPUs 0 and 1 are joined by " << name_of(joined.topology) << ": " << joined.reason << "\n";
  const bool by_nvlink = joined.topology == GpuTopology::nv_switch || joined.topology == GpuTopology::full_mesh;
  EXPECT_EQ(by_nvlink, cuda::link_between(0, 1) == "NVLink");
  CUdevice one = 0, two = 0;
  int can = 0;
  cuda::api()->device_get(&one, 0);
  cuda::api()->device_get(&two, 1);
  ASSERT_EQ(cuda::api()->device_can_access_peer(&can, one, two), CUDA_SUCCESS);
  EXPECT_EQ(joined.topology == GpuTopology::none, can == 0);
  EXPECT_NE(joined.topology, GpuTopology::unknown) << joined.reason;
  // All GPUs of the machine, of which there may be more.
  const auto all = joined_here(cuda::devices());
  std::cout << "all " << cuda::devices() << " GPUs are joined by " << name_of(all.topology) << ": " << all.reason
            << "\n";
  EXPECT_NE(all.topology, GpuTopology::unknown) << all.reason;
}

}  // namespace
}  // namespace tensorferry::testing
