#include "rpc/collectives/cuda/nvml.h"

#include <dlfcn.h>

#include "base/symbols.h"
#include "base/text.h"

namespace tensorferry::collectives::cuda {
namespace {

using Device = void*;
using NvmlResult = int;

// Values of nvml.h.
constexpr NvmlResult success = 0, invalid_argument = 2, not_supported = 3;
constexpr unsigned p2p_supported = 0;                                        // NVML_NVLINK_CAP_P2P_SUPPORTED
constexpr unsigned mig_enabled = 1;                                          // NVML_DEVICE_MIG_ENABLE
constexpr unsigned remote_gpu = 0, remote_switch = 2, remote_unknown = 255;  // nvmlIntNvLinkDeviceType_t
constexpr unsigned p2p_read = 0, p2p_write = 1;                              // nvmlGpuP2PCapsIndex_t
constexpr unsigned p2p_ok = 0, last_p2p_refusal = 5;                         // nvmlGpuP2PStatus_t

/// nvmlPciInfo_t.
struct NvmlPci {
  std::array<char, 16> legacy_bus_id;
  unsigned domain, bus, device;
  unsigned device_id, subsystem_id;
  std::array<char, 32> bus_id;
};
static_assert(sizeof(NvmlPci) == 68);

/// NVML's functions, named as in nvml.h without the prefix. Those after `nvlink_remote_pci` may be null.
struct NvmlFunctions {
  NvmlResult (*init)() = nullptr;
  const char* (*error_string)(NvmlResult) = nullptr;
  NvmlResult (*handle_by_pci_bus_id)(const char*, Device*) = nullptr;
  NvmlResult (*nvlink_state)(Device, unsigned link, unsigned* active) = nullptr;
  NvmlResult (*nvlink_remote_pci)(Device, unsigned link, void* pci) = nullptr;  // an NvmlPci
  NvmlResult (*nvlink_remote_type)(Device, unsigned link, unsigned* type) = nullptr;
  NvmlResult (*nvlink_capability)(Device, unsigned link, unsigned capability, unsigned* value) = nullptr;
  NvmlResult (*mig_mode)(Device, unsigned* current, unsigned* pending) = nullptr;
  NvmlResult (*name)(Device, char*, unsigned size) = nullptr;
  NvmlResult (*common_ancestor)(Device, Device, unsigned* level) = nullptr;
  NvmlResult (*p2p_status)(Device, Device, unsigned index, unsigned* status) = nullptr;
};

struct LoadedNvml {
  NvmlFunctions functions;
  std::string missing;
};

LoadedNvml load() {
  LoadedNvml out;
  auto* const library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);  // stays open until the process ends
  if (library == nullptr) {
    out.missing = "there is no NVML (libnvidia-ml.so.1 does not load), which knows the NVLinks";
    return out;
  }
  Symbols find("NVML", library);
  auto& f = out.functions;
  find(f.init, "nvmlInit_v2");
  find(f.error_string, "nvmlErrorString");
  find(f.handle_by_pci_bus_id, "nvmlDeviceGetHandleByPciBusId_v2");
  find(f.nvlink_state, "nvmlDeviceGetNvLinkState");
  find(f.nvlink_remote_pci, "nvmlDeviceGetNvLinkRemotePciInfo_v2");
  find.optional(f.nvlink_remote_type, "nvmlDeviceGetNvLinkRemoteDeviceType");
  find.optional(f.nvlink_capability, "nvmlDeviceGetNvLinkCapability");
  find.optional(f.mig_mode, "nvmlDeviceGetMigMode");
  find.optional(f.name, "nvmlDeviceGetName");
  find.optional(f.common_ancestor, "nvmlDeviceGetTopologyCommonAncestor");
  find.optional(f.p2p_status, "nvmlDeviceGetP2PStatus");
  out.missing = find.missing();
  if (!out.missing.empty()) return out;
  if (const auto result = f.init(); result != success) {
    out.missing = formatted("NVML does not start: {}", f.error_string(result));
  }
  return out;
}

const LoadedNvml& loaded() {
  static const auto& once = *new LoadedNvml(load());
  return once;
}

/// NVML names this address if it knows that a link is up, but not what it leads to: the switches of a virtual machine.
bool is_hidden(const NvmlPci& pci) { return pci.domain == 0xffffffffU || pci.bus > 0xffU; }

/// Returns what a link that is up leads to.
NvLink end_of(const NvmlFunctions& nvml, Device device, unsigned link) {
  if (nvml.nvlink_capability != nullptr) {
    unsigned supported = 0;
    const auto asked = nvml.nvlink_capability(device, link, p2p_supported, &supported);
    if (asked == success && supported == 0) return {LinkEnd::other, {}};
  }
  auto type = remote_unknown;
  if (nvml.nvlink_remote_type == nullptr || nvml.nvlink_remote_type(device, link, &type) != success) {
    type = remote_unknown;
  }
  if (type == remote_switch) return {LinkEnd::nv_switch, {}};
  NvmlPci pci{};
  if (nvml.nvlink_remote_pci(device, link, &pci) != success) return {LinkEnd::other, {}};
  const PciAddress at{pci.domain, pci.bus, pci.device};
  if (type == remote_gpu) return {LinkEnd::gpu, at};
  if (type == remote_unknown) return is_hidden(pci) ? NvLink{LinkEnd::hidden, {}} : NvLink{LinkEnd::gpu, at};
  return {LinkEnd::other, {}};
}

}  // namespace

void add_facts_of_nvml(GpuFacts& facts) {
  if (!loaded().missing.empty()) {
    facts.unknown = loaded().missing;
    return;
  }
  const auto& nvml = loaded().functions;
  const auto fails = [&](std::string_view what, NvmlResult result) {
    facts.unknown = formatted("NVML does not {} {}: {}", what, text_of(facts.pci), nvml.error_string(result));
  };
  Device device = nullptr;
  auto result = nvml.handle_by_pci_bus_id(text_of(facts.pci).c_str(), &device);
  if (result != success) return fails("find the GPU", result);

  std::array<char, 64> name{};
  if (nvml.name != nullptr && nvml.name(device, name.data(), name.size()) == success) {
    facts.name = FixedText<64>(std::string_view(name.data()));
  }
  unsigned current = 0, pending = 0;
  if (nvml.mig_mode != nullptr && nvml.mig_mode(device, &current, &pending) == success && current == mig_enabled) {
    facts.unknown = formatted("MIG divides the GPU {}, so its parts have no NVLinks", text_of(facts.pci));
    return;
  }
  for (unsigned link = 0; link < GpuFacts::most_links; ++link) {
    unsigned active = 0;
    result = nvml.nvlink_state(device, link, &active);
    if (result == not_supported || result == invalid_argument) break;  // the GPU has no more links
    if (result != success) return fails("tell the NVLinks of", result);
    if (active != 0) facts.links.at(link) = end_of(nvml, device, link);
  }
}

PairFacts pair_facts_of_nvml(const PciAddress& from, const PciAddress& to) {
  PairFacts out;
  if (!loaded().missing.empty()) return out;
  const auto& nvml = loaded().functions;
  Device one = nullptr, two = nullptr;
  if (nvml.handle_by_pci_bus_id(text_of(from).c_str(), &one) != success) return out;
  if (nvml.handle_by_pci_bus_id(text_of(to).c_str(), &two) != success) return out;
  unsigned level = 0;
  if (nvml.common_ancestor != nullptr && nvml.common_ancestor(one, two, &level) == success && level < 255) {
    out.common_ancestor = static_cast<std::uint8_t>(level);
  }
  unsigned reads = 0, writes = 0;
  if (nvml.p2p_status == nullptr || nvml.p2p_status(one, two, p2p_read, &reads) != success ||
      nvml.p2p_status(one, two, p2p_write, &writes) != success) {
    return out;
  }
  if (reads == p2p_ok && writes == p2p_ok) out.peer_access = PairFacts::PeerAccess::yes;
  if ((reads != p2p_ok && reads <= last_p2p_refusal) || (writes != p2p_ok && writes <= last_p2p_refusal)) {
    out.peer_access = PairFacts::PeerAccess::no;
  }
  return out;
}

}  // namespace tensorferry::collectives::cuda
