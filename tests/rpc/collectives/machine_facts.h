/// The facts that the ranks of a group would find out about their GPUs on a machine of tests/emulated_gpu/machines.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

#include "rpc/collectives/gpu_topology.h"
#include "tests/emulated_gpu/machines.h"

namespace tensorferry::testing {

struct RecordedFacts {
  std::vector<collectives::GpuFacts> gpus;
  std::vector<collectives::PairFacts> pairs;
  [[nodiscard]] collectives::JoinedGpus joined() const { return collectives::joined_gpus(gpus, pairs); }
};

inline const emulated::Machine& machine(std::string_view name) {
  const auto& all = emulated::machines();
  return *std::find_if(all.begin(), all.end(), [&](const auto& each) { return each.name == name; });
}

/// Returns the facts of ranks that have these GPUs of the machine, by rank; a GPU may be there several times.
inline RecordedFacts facts_on(const emulated::Machine& machine, const std::vector<std::size_t>& gpus) {
  using collectives::LinkEnd;
  const auto address = [&](std::size_t gpu) {
    const auto place = machine.place(gpu);
    return collectives::PciAddress{place.domain, place.bus, place.device};
  };
  RecordedFacts out;
  for (const auto gpu : gpus) {
    collectives::GpuFacts facts;
    facts.uuid[0] = static_cast<char>(gpu + 1);
    facts.pci = address(gpu);
    facts.name = machine.gpu;
    std::size_t next = 0;
    for (int i = 0; i < machine.switch_links; ++i) facts.links.at(next++).end = LinkEnd::nv_switch;
    for (int i = 0; i < machine.hidden_links; ++i) facts.links.at(next++).end = LinkEnd::hidden;
    for (std::size_t other = 0; other < machine.addresses.size(); ++other) {
      for (int i = 0; i < machine.links_between(gpu, other); ++i) {
        facts.links.at(next++) = {LinkEnd::gpu, address(other)};
      }
    }
    if (machine.mig) {
      facts.links = {};
      facts.unknown = "MIG divides the GPU " + text_of(facts.pci) + ", so its parts have no NVLinks";
    }
    out.gpus.push_back(facts);
    for (const auto other : gpus) {
      collectives::PairFacts pair;
      using PeerAccess = collectives::PairFacts::PeerAccess;
      pair.peer_access = other == gpu || machine.has_peer_access(gpu, other) ? PeerAccess::yes : PeerAccess::no;
      pair.common_ancestor = static_cast<std::uint8_t>(other == gpu ? 0 : machine.ancestor(gpu, other));
      out.pairs.push_back(pair);
    }
  }
  return out;
}

}  // namespace tensorferry::testing
