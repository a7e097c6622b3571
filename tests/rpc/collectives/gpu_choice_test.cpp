// How GPUs are joined, and the algorithm that a group takes there, on machines that are known (machines.h).
#include "rpc/collectives/gpu_choice.h"

#include <gmock/gmock.h>

#include <numeric>

#include "tests/rpc/collectives/machine_facts.h"

namespace tensorferry::testing {
namespace {

using collectives::AlgorithmOnGpu;
using collectives::AskedOnGpu;
using collectives::choose_on_gpu;
using collectives::explain_on_gpu;
using collectives::GpuTopology;
using collectives::JoinedGpus;
using collectives::Operation;
using collectives::OwnInput;
using collectives::parse_algorithms;
using collectives::parse_crossings;
using collectives::RankPlacement;
using ::testing::HasSubstr;
using Gpus = std::vector<std::size_t>;

Gpus first(std::size_t count) {
  Gpus out(count);
  std::iota(out.begin(), out.end(), 0);
  return out;
}

struct JoinedOn {
  std::string_view machine;
  Gpus gpus;
  GpuTopology topology;
  std::string_view reason;
};
void PrintTo(const JoinedOn& each, std::ostream* out) { *out << each.machine << " with " << each.gpus.size(); }

class MachineTopology : public ::testing::TestWithParam<JoinedOn> {};

TEST_P(MachineTopology, FollowsFromTheFactsOfTheRanks) {
  const auto& [name, gpus, topology, reason] = GetParam();
  const auto joined = facts_on(machine(name), gpus).joined();
  EXPECT_EQ(joined.topology, topology);
  EXPECT_THAT(joined.reason, HasSubstr(std::string(reason)));
}

TEST_P(MachineTopology, DoesNotDependOnTheOrderOfTheRanks) {
  auto gpus = GetParam().gpus;
  for (int i = 0; i < 40; ++i) {  // some of the orders
    std::rotate(gpus.begin(), gpus.begin() + 1, gpus.end());
    if (i % 3 == 0) std::swap(gpus.front(), gpus[gpus.size() / 2]);
    EXPECT_EQ(facts_on(machine(GetParam().machine), gpus).joined().topology, GetParam().topology);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Recorded, MachineTopology,
    ::testing::Values(
        JoinedOn{"dgx-h100", first(8), GpuTopology::nv_switch, "18 NVLinks of each GPU lead to switches"},
        JoinedOn{"dgx-h100", {3, 6}, GpuTopology::nv_switch, "18 NVLinks"},
        JoinedOn{"dgx-a100", first(8), GpuTopology::nv_switch, "12 NVLinks of each GPU lead to switches"},
        JoinedOn{"hgx-a100-4", first(4), GpuTopology::full_mesh, "4 or more NVLinks join each two GPUs"},
        JoinedOn{"dgx-1v", first(8), GpuTopology::none, "there is no peer access between the GPUs of ranks 1 and 4"},
        JoinedOn{"dgx-1v", first(4), GpuTopology::full_mesh, "1 or more NVLinks"},
        JoinedOn{"dgx-1v", {4, 5, 6, 7}, GpuTopology::full_mesh, "1 or more NVLinks"},
        JoinedOn{"dgx-1v", {0, 4}, GpuTopology::full_mesh, "2 or more NVLinks"},
        JoinedOn{"dgx-1v", {0, 5}, GpuTopology::none, "ranks 0 and 1 (00000000:06:00.0 and 00000000:86:00.0)"},
        JoinedOn{"dgx-1v", {0, 1, 2, 4}, GpuTopology::none, "no peer access"},
        JoinedOn{"workstation", first(2), GpuTopology::pcie, "all have peer access through a host bridge"},
        JoinedOn{"bridged-pairs", first(4), GpuTopology::pcie, "NVLinks join 2 of 6 pairs"},
        JoinedOn{"bridged-pairs", {2, 3}, GpuTopology::full_mesh, "4 or more NVLinks"},
        JoinedOn{"cloud-t4", first(4), GpuTopology::none, "no peer access between the GPUs of ranks 0 and 1"},
        JoinedOn{"cloud-a100", first(8), GpuTopology::nv_switch,
                 "12 NVLinks of each GPU lead to devices that this machine hides"},
        JoinedOn{"mig", first(2), GpuTopology::none, "no peer access"},
        JoinedOn{"dgx-h100", {5, 5, 5}, GpuTopology::one_gpu, "all ranks have the same GPU"},
        JoinedOn{"dgx-h100", {5, 5, 6}, GpuTopology::nv_switch, "18 NVLinks"}));

TEST(GpuTopologies, AreUnknownWithTheReasonIfARankDoesNotKnowItsLinks) {
  auto facts = facts_on(machine("dgx-h100"), first(4));
  facts.gpus[2].unknown = "there is no NVML (libnvidia-ml.so.1 does not load), which knows the NVLinks";
  EXPECT_EQ(facts.joined().topology, GpuTopology::unknown);
  EXPECT_EQ(facts.joined().reason,
            "at rank 2, there is no NVML (libnvidia-ml.so.1 does not load), which knows the NVLinks");
  // That two GPUs do not reach one another is known without NVML.
  facts.pairs[1].peer_access = collectives::PairFacts::PeerAccess::no;
  EXPECT_EQ(facts.joined().topology, GpuTopology::none);
}

TEST(GpuTopologies, BelieveTheWorseOfTwoRanksThatContradictEachOther) {
  auto facts = facts_on(machine("hgx-a100-4"), first(4));
  for (auto& link : facts.gpus[1].links) {  // its links to GPU 0 are down, as far as it knows
    if (link.at == facts.gpus[0].pci) link = {};
  }
  EXPECT_EQ(facts.joined().topology, GpuTopology::pcie);
  facts = facts_on(machine("workstation"), first(2));
  facts.pairs[2].peer_access = collectives::PairFacts::PeerAccess::unknown;
  EXPECT_EQ(facts.joined().topology, GpuTopology::unknown);
  EXPECT_THAT(facts.joined().reason, HasSubstr("does not say whether they have peer access"));
}

TEST(GpuTopologies, DoNotTakeHiddenLinksForSwitchesWithoutPeerAccess) {
  auto facts = facts_on(machine("cloud-a100"), first(8));
  for (auto& pair : facts.pairs) pair.peer_access = collectives::PairFacts::PeerAccess::unknown;
  EXPECT_EQ(facts.joined().topology, GpuTopology::unknown);
}

TEST(RankPlacements, SayWhoSharesGpusAndProcesses) {
  const auto placed = [](const Gpus& gpus, bool apart) {
    return collectives::placement_of(facts_on(machine("dgx-h100"), gpus).gpus, apart);
  };
  EXPECT_EQ(placed({0, 1, 2}, true), RankPlacement::gpu_each);
  EXPECT_EQ(placed({0, 1, 2}, false), RankPlacement::gpu_each);
  EXPECT_EQ(placed({4, 4}, true), RankPlacement::one_gpu);
  EXPECT_EQ(placed({4, 4}, false), RankPlacement::one_gpu_threads);
  EXPECT_EQ(placed({4, 5, 4}, true), RankPlacement::some_share);
}

// ---- the choice

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

/// Asks for the algorithm of a group whose ranks have these GPUs of the machine.
struct Asking {
  std::string_view machine;
  Gpus gpus;
  Operation operation = Operation::all_reduce;
  std::size_t bytes = 0;
  bool apart = true;
  std::string_view prescribed = "";
  std::string_view crossings = "";
  bool flags = true;
  bool captured = false;

  [[nodiscard]] std::pair<AskedOnGpu, JoinedGpus> asked() const {
    const auto facts = facts_on(testing::machine(machine), gpus);
    const auto joined = facts.joined();
    using PeerAccess = collectives::PairFacts::PeerAccess;
    const bool reachable = std::none_of(facts.pairs.begin(), facts.pairs.end(),
                                        [](const auto& each) { return each.peer_access == PeerAccess::no; });
    const auto placement = collectives::placement_of(facts.gpus, apart);
    return {AskedOnGpu{operation, bytes, gpus.size(), placement, reachable, flags, captured}, joined};
  }
  [[nodiscard]] AlgorithmOnGpu algorithm() const {
    return choose_on_gpu(asked().first, *parse_algorithms(prescribed), *parse_crossings(crossings)).algorithm;
  }
  [[nodiscard]] std::string text() const {
    const auto [question, joined] = asked();
    return explain_on_gpu(question, joined, *parse_algorithms(prescribed), *parse_crossings(crossings));
  }
};

struct Chosen {
  Asking asking;
  AlgorithmOnGpu algorithm;
  std::vector<std::string_view> said;  // by explain
};
void PrintTo(const Chosen& each, std::ostream* out) {
  *out << each.asking.machine << ", " << each.asking.gpus.size() << " ranks, " << each.asking.bytes << " bytes";
}

class MachineChoice : public ::testing::TestWithParam<Chosen> {};

TEST_P(MachineChoice, IsMadeAndExplained) {
  const auto& [asking, algorithm, said] = GetParam();
  EXPECT_EQ(collectives::name_of(asking.algorithm()), collectives::name_of(algorithm));
  for (const auto text : said) EXPECT_THAT(asking.text(), HasSubstr(std::string(text)));
}

INSTANTIATE_TEST_SUITE_P(
    Recorded, MachineChoice,
    ::testing::Values(
        Chosen{{"dgx-h100", first(8), Operation::all_reduce, 256 * KiB},
               AlgorithmOnGpu::one_shot,
               {"one_shot (two_shot is for more than 262144 bytes, by default",
                "by_one and by_host are for ranks that share",
                "each of the 8 ranks has a GPU, joined by NVSwitch: 18 NVLinks"}},
        Chosen{{"dgx-h100", first(8), Operation::all_reduce, 256 * KiB + 1},
               AlgorithmOnGpu::two_shot,
               {"two_shot (one_shot is for up to 262144 bytes, by default"}},
        Chosen{{"dgx-a100", first(8), Operation::reduce, 1}, AlgorithmOnGpu::one_shot, {"joined by NVSwitch: 12"}},
        Chosen{{"hgx-a100-4", first(4), Operation::all_reduce, 64 * MiB}, AlgorithmOnGpu::two_shot, {"full mesh"}},
        Chosen{{"workstation", first(2), Operation::all_reduce, 1 * MiB}, AlgorithmOnGpu::two_shot, {"joined by PCIe"}},
        Chosen{{"workstation", first(2), Operation::all_reduce, 0}, AlgorithmOnGpu::one_shot, {"joined by PCIe"}},
        Chosen{{"dgx-1v", first(8), Operation::all_reduce, 1 * KiB}, AlgorithmOnGpu::staged, {"no peer access"}},
        Chosen{{"dgx-1v", first(4), Operation::all_reduce, 1 * KiB}, AlgorithmOnGpu::one_shot, {"full mesh"}},
        Chosen{{"cloud-t4", first(4), Operation::broadcast, 1 * KiB}, AlgorithmOnGpu::staged, {"no peer access"}},
        Chosen{{"dgx-h100", first(8), Operation::broadcast, 1 * MiB},
               AlgorithmOnGpu::copies,
               {"copies (the only algorithm of broadcast on GPUs)"}},
        Chosen{{"dgx-h100", first(8), Operation::all_to_all, 1 * MiB}, AlgorithmOnGpu::copies, {"all_to_all"}},
        Chosen{{"dgx-h100", first(8), Operation::reduce_scatter, 8 * MiB}, AlgorithmOnGpu::one_shot, {"the only"}},
        Chosen{{"dgx-h100", {2}, Operation::all_reduce, 8 * MiB}, AlgorithmOnGpu::one_shot, {"there is one rank"}},
        // Ranks that share GPUs.
        Chosen{{"dgx-h100", {0, 0}, Operation::all_reduce, 256 * KiB},
               AlgorithmOnGpu::by_host,
               {"by_host (the host reduces up to 262144 bytes", "by_one is for more bytes", "the 2 ranks share a GPU"}},
        Chosen{{"dgx-h100", {0, 0}, Operation::all_reduce, 256 * KiB + 1},
               AlgorithmOnGpu::by_one,
               {"by_one (one rank reduces for all", "by_host is for up to 262144 bytes", "bytes cross the host"}},
        Chosen{{"dgx-h100", {0, 0}, Operation::all_reduce, 1 * KiB, false},
               AlgorithmOnGpu::by_one,
               {"by_host needs a process for each rank"}},
        Chosen{{"dgx-h100", {0, 0, 1}, Operation::all_reduce, 1 * KiB},
               AlgorithmOnGpu::one_shot,
               {"some of the 3 ranks share a GPU"}},
        // What the user prescribes comes first.
        Chosen{{"dgx-h100", first(8), Operation::all_reduce, 1 * KiB, true, "all_reduce=two_shot"},
               AlgorithmOnGpu::two_shot,
               {"two_shot (prescribed)"}},
        Chosen{{"dgx-h100", {0, 0}, Operation::all_reduce, 1 * MiB, true, "all_reduce=one_shot"},
               AlgorithmOnGpu::one_shot,
               {"one_shot (prescribed)"}},
        Chosen{{"dgx-h100", first(8), Operation::all_reduce, 1 * KiB, true, "all_reduce=ring"},
               AlgorithmOnGpu::one_shot,
               {"by default"}},
        Chosen{{"dgx-h100", first(8), Operation::reduce, 1 * KiB, true, "all_reduce=two_shot"},
               AlgorithmOnGpu::one_shot,
               {"by default"}},
        // How the ranks meet.
        Chosen{{"dgx-h100", first(8), Operation::all_reduce, 10 * MiB},
               AlgorithmOnGpu::two_shot,
               {", whose kernels meet by flags in the memory of the GPUs"}},
        Chosen{{"dgx-h100", first(8), Operation::all_reduce, 10 * MiB + 1},
               AlgorithmOnGpu::two_shot,
               {", whose streams meet by words, because kernels meet up to 10485760 bytes"}},
        Chosen{{"dgx-h100", first(8), Operation::all_reduce, 10 * MiB + 1, true, "", "", true, true},
               AlgorithmOnGpu::two_shot,
               {", whose kernels meet by flags in the memory of the GPUs"}},
        Chosen{{"dgx-h100", first(8), Operation::all_reduce, 1 * KiB, true, "", "", false},
               AlgorithmOnGpu::one_shot,
               {", whose streams meet by words, because a GPU is older than 7.0"}},
        Chosen{{"dgx-h100", {0, 0, 1}, Operation::all_reduce, 1 * KiB},
               AlgorithmOnGpu::one_shot,
               {", whose streams meet by words, because kernels of ranks that share a GPU run by turns"}},
        Chosen{{"dgx-h100", first(8), Operation::reduce_scatter, 1 * KiB},
               AlgorithmOnGpu::one_shot,
               {", whose kernels meet by flags in the memory of the GPUs"}},
        Chosen{{"dgx-h100", first(8), Operation::all_to_all, 10 * MiB},
               AlgorithmOnGpu::copies,
               {", whose kernels meet by flags in the memory of the GPUs"}},
        Chosen{{"dgx-h100", first(8), Operation::all_gather, 10 * MiB + 1},
               AlgorithmOnGpu::copies,
               {", whose streams meet by words, because kernels meet up to 10485760 bytes"}},
        Chosen{{"dgx-h100", {0, 0, 1}, Operation::broadcast, 1 * KiB},
               AlgorithmOnGpu::copies,
               {", whose streams meet by words, because kernels of ranks that share a GPU run by turns"}},
        // Then what has been measured.
        Chosen{{"dgx-h100", first(8), Operation::all_reduce, 1 * MiB, true, "", "all_reduce=one_shot:1048576:two_shot"},
               AlgorithmOnGpu::one_shot,
               {"two_shot is for more than 1048576 bytes, as measured by `tensorferry tune`"}},
        Chosen{{"dgx-h100", first(8), Operation::all_reduce, 1 * KiB, true, "", "all_reduce=two_shot"},
               AlgorithmOnGpu::two_shot,
               {"one_shot is for up to 0 bytes, as measured"}},
        Chosen{{"dgx-h100", first(8), Operation::all_reduce, 1024 * MiB, true, "", "all_reduce=one_shot"},
               AlgorithmOnGpu::one_shot,
               {"as measured"}},
        Chosen{{"dgx-h100", {0, 0}, Operation::all_reduce, 1 * MiB, true, "", "all_reduce=one_shot"},
               AlgorithmOnGpu::by_one,
               {"share a GPU"}},
        Chosen{{"dgx-h100", first(8), Operation::reduce, 1 * MiB, true, "", "all_reduce=one_shot"},
               AlgorithmOnGpu::two_shot,
               {"by default"}}));

TEST(GpuChoices, AreTheSameAtRanksWhoseInputsLieDifferently) {
  for (const auto& machine : emulated::machines()) {
    for (std::size_t ranks = 1; ranks <= machine.addresses.size(); ++ranks) {
      for (int operation = 0; operation <= static_cast<int>(Operation::last); ++operation) {
        for (const std::size_t bytes : {std::size_t{0}, 1 * KiB, 256 * KiB, 256 * KiB + 1, 64 * MiB}) {
          auto [asked, joined] = Asking{machine.name, first(ranks), static_cast<Operation>(operation), bytes}.asked();
          const auto all = choose_on_gpu(asked, {}, {});
          EXPECT_EQ(all.own_input, OwnInput::in_place);
          asked.aligned = false;
          EXPECT_EQ(choose_on_gpu(asked, {}, {}).algorithm, all.algorithm);
          EXPECT_EQ(choose_on_gpu(asked, {}, {}).own_input, OwnInput::copied);
          EXPECT_THAT(explain_on_gpu(asked, joined, {}, {}), HasSubstr("not aligned to 16 bytes"));
          asked.contiguous = false;
          EXPECT_EQ(choose_on_gpu(asked, {}, {}).algorithm, all.algorithm);
          EXPECT_EQ(choose_on_gpu(asked, {}, {}).own_input, OwnInput::made_dense);
          EXPECT_THAT(explain_on_gpu(asked, joined, {}, {}), HasSubstr("a dense copy is made first"));
        }
      }
    }
  }
}

}  // namespace
}  // namespace tensorferry::testing
