#include "rpc/collectives/gpu_topology.h"

#include <algorithm>
#include <set>
#include <vector>

#include "base/text.h"

namespace tensorferry::collectives {
namespace {

constexpr std::array<std::string_view, 6> topologies{"unknown",   "one GPU", "NVSwitch",
                                                     "full mesh", "PCIe",    "no peer access"};

/// The GPUs of a group, each once, with what joins each two of them.
class Graph final {
 public:
  Graph(std::span<const GpuFacts> gpus, std::span<const PairFacts> pairs) : all_(gpus), pairs_(pairs) {
    for (std::size_t rank = 0; rank < gpus.size(); ++rank) {
      const auto same = [&](std::size_t other) { return gpus[other].uuid == gpus[rank].uuid; };
      if (std::none_of(ranks_.begin(), ranks_.end(), same)) ranks_.push_back(rank);
    }
  }
  [[nodiscard]] std::size_t size() const { return ranks_.size(); }
  /// The first rank that has the GPU.
  [[nodiscard]] std::size_t rank(std::size_t gpu) const { return ranks_[gpu]; }
  [[nodiscard]] const GpuFacts& facts(std::size_t gpu) const { return all_[ranks_[gpu]]; }

  [[nodiscard]] std::size_t links(std::size_t gpu, LinkEnd end) const {
    const auto& of = facts(gpu).links;
    return static_cast<std::size_t>(
        std::count_if(of.begin(), of.end(), [end](const NvLink& each) { return each.end == end; }));
  }
  /// Returns how many NVLinks join two GPUs, as both of them say.
  [[nodiscard]] std::size_t links_between(std::size_t one, std::size_t two) const {
    return std::min(links_to(one, two), links_to(two, one));
  }
  [[nodiscard]] PairFacts::PeerAccess peer_access(std::size_t one, std::size_t two) const {
    const auto there = pair(one, two).peer_access, back = pair(two, one).peer_access;
    using PeerAccess = PairFacts::PeerAccess;
    if (there == PeerAccess::no || back == PeerAccess::no) return PeerAccess::no;
    return there == PeerAccess::yes && back == PeerAccess::yes ? PeerAccess::yes : PeerAccess::unknown;
  }
  [[nodiscard]] std::string named(std::size_t one, std::size_t two) const {
    return formatted("the GPUs of ranks {} and {} ({} and {})", ranks_[one], ranks_[two], text_of(facts(one).pci),
                     text_of(facts(two).pci));
  }

 private:
  [[nodiscard]] std::size_t links_to(std::size_t from, std::size_t to) const {
    const auto& of = facts(from).links;
    return static_cast<std::size_t>(std::count_if(of.begin(), of.end(), [&](const NvLink& each) {
      return each.end == LinkEnd::gpu && each.at == facts(to).pci;
    }));
  }
  [[nodiscard]] const PairFacts& pair(std::size_t from, std::size_t to) const {
    return pairs_[ranks_[from] * all_.size() + ranks_[to]];
  }
  std::span<const GpuFacts> all_;
  std::span<const PairFacts> pairs_;
  std::vector<std::size_t> ranks_;
};

template <class Asked>
bool each_pair(std::size_t gpus, const Asked& asked) {
  for (std::size_t one = 0; one < gpus; ++one) {
    for (std::size_t two = 0; two < one; ++two) {
      if (!asked(two, one)) return false;
    }
  }
  return true;
}

/// Returns how far apart two GPUs are on PCIe, for people.
std::string_view text_of_level(std::uint8_t level) {
  if (level == 255) return "an unknown way";
  if (level < 10) return "one board";
  if (level < 20) return "one PCIe switch";
  if (level < 30) return "several PCIe switches";
  if (level < 40) return "a host bridge";
  if (level < 50) return "a NUMA node";
  return "the host's processors";
}

}  // namespace

std::string text_of(const PciAddress& address) {
  auto out = hex(address.domain, 8) + ":" + hex(address.bus, 2) + ":" + hex(address.device, 2) + ".0";
  for (auto& each : out) {
    if (each >= 'a' && each <= 'f') each = static_cast<char>(each - 'a' + 'A');
  }
  return out;
}

std::string_view name_of(GpuTopology topology) noexcept { return topologies.at(static_cast<std::size_t>(topology)); }

JoinedGpus joined_gpus(std::span<const GpuFacts> gpus, std::span<const PairFacts> pairs) {
  const Graph graph(gpus, pairs);
  if (graph.size() < 2) return {GpuTopology::one_gpu, "all ranks have the same GPU"};

  std::string barred;  // the first two GPUs without peer access
  bool all_peers = true;
  std::uint8_t farthest = 0;
  each_pair(graph.size(), [&](std::size_t one, std::size_t two) {
    const auto access = graph.peer_access(one, two);
    all_peers = all_peers && access == PairFacts::PeerAccess::yes;
    if (access == PairFacts::PeerAccess::no && barred.empty()) barred = graph.named(one, two);
    const auto ways = gpus.size();
    farthest = std::max({farthest, pairs[graph.rank(one) * ways + graph.rank(two)].common_ancestor,
                         pairs[graph.rank(two) * ways + graph.rank(one)].common_ancestor});
    return true;
  });

  for (std::size_t gpu = 0; gpu < graph.size(); ++gpu) {
    const auto why = graph.facts(gpu).unknown.text();
    if (why.empty()) continue;
    if (!barred.empty()) return {GpuTopology::none, "there is no peer access between " + barred};
    return {GpuTopology::unknown, formatted("at rank {}, {}", graph.rank(gpu), why)};
  }

  if (!barred.empty()) return {GpuTopology::none, "there is no peer access between " + barred};

  std::size_t fewest = GpuFacts::most_links, fewest_hidden = GpuFacts::most_links;
  for (std::size_t gpu = 0; gpu < graph.size(); ++gpu) {
    fewest = std::min(fewest, graph.links(gpu, LinkEnd::nv_switch));
    fewest_hidden = std::min(fewest_hidden, graph.links(gpu, LinkEnd::hidden));
  }
  if (fewest != 0) return {GpuTopology::nv_switch, formatted("{} NVLinks of each GPU lead to switches", fewest)};
  if (fewest_hidden != 0 && all_peers) {
    return {GpuTopology::nv_switch,
            formatted("{} NVLinks of each GPU lead to devices that this machine hides, as virtual machines hide "
                      "switches, and all GPUs have peer access",
                      fewest_hidden)};
  }

  fewest = GpuFacts::most_links;
  std::size_t joined = 0, joinable = 0;
  each_pair(graph.size(), [&](std::size_t one, std::size_t two) {
    const auto links = graph.links_between(one, two);
    fewest = std::min(fewest, links);
    ++joinable;
    if (links != 0) ++joined;
    return true;
  });
  if (fewest != 0) return {GpuTopology::full_mesh, formatted("{} or more NVLinks join each two GPUs", fewest)};

  if (all_peers) {
    const auto links =
        joined == 0 ? std::string("no NVLink joins GPUs") : formatted("NVLinks join {} of {} pairs", joined, joinable);
    return {GpuTopology::pcie, formatted("{}, and all have peer access through {}", links, text_of_level(farthest))};
  }
  return {GpuTopology::unknown, "no NVLink joins all GPUs, and the driver does not say whether they have peer access"};
}

RankPlacement placement_of(std::span<const GpuFacts> gpus, bool apart) {
  std::set<std::array<char, 16>> different;
  for (const auto& each : gpus) different.insert(each.uuid);
  if (different.size() == gpus.size()) return RankPlacement::gpu_each;
  if (different.size() > 1) return RankPlacement::some_share;
  return apart ? RankPlacement::one_gpu : RankPlacement::one_gpu_threads;
}

}  // namespace tensorferry::collectives
