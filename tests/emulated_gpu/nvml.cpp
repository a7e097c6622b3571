// The emulated NVML: it replays the NVLinks and the PCIe of the machine that EMULATED_MACHINE names. Without one it
// knows no GPU.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "tests/emulated_gpu/machines.h"

namespace {

// Values and layouts of nvml.h.
constexpr int success = 0, invalid_argument = 2, not_supported = 3, not_found = 6, insufficient_size = 7;
constexpr unsigned remote_gpu = 0, remote_switch = 2, remote_unknown = 255;
constexpr unsigned p2p_ok = 0, p2p_chipset_not_supported = 1;

struct PciInfo {
  char busIdLegacy[16];  // NOLINT(modernize-avoid-c-arrays)
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];  // NOLINT(modernize-avoid-c-arrays)
};

/// A handle is the number of a GPU, from 1.
std::size_t gpu_of(void* device) { return reinterpret_cast<std::uintptr_t>(device) - 1; }

/// What a link leads to: the number of a GPU, or one of these.
enum End : int { down = -1, to_switch = -2, to_hidden = -3 };

int end_of(const emulated::Machine& machine, std::size_t gpu, int link) {
  if (link < machine.switch_links) return to_switch;
  if (link < machine.hidden_links) return to_hidden;
  for (std::size_t other = 0; other < machine.addresses.size(); ++other) {
    link -= machine.links_between(gpu, other);
    if (link < 0) return static_cast<int>(other);
  }
  return down;
}

/// Returns the result of a call about a link, and its end if that is success.
int ask(void* device, unsigned link, int& end) {
  const auto* const machine = emulated::this_machine();
  if (machine == nullptr) return not_found;
  if (machine->links == 0) return not_supported;
  if (link >= static_cast<unsigned>(machine->links)) return invalid_argument;
  end = end_of(*machine, gpu_of(device), static_cast<int>(link));
  return success;
}

}  // namespace

extern "C" {

int nvmlInit_v2() { return success; }
const char* nvmlErrorString(int result) { return result == not_found ? "Not Found" : "Unknown Error"; }

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  const auto* const machine = emulated::this_machine();
  if (machine == nullptr) return not_found;
  const auto it = std::find(machine->addresses.begin(), machine->addresses.end(), std::string_view(id));
  if (it == machine->addresses.end()) return not_found;
  *device = reinterpret_cast<void*>(it - machine->addresses.begin() + 1);
  return success;
}

int nvmlDeviceGetName(void*, char* name, unsigned size) {
  const auto* const machine = emulated::this_machine();
  if (machine == nullptr) return not_found;
  if (machine->gpu.size() >= size) return insufficient_size;
  std::memcpy(name, machine->gpu.data(), machine->gpu.size());
  name[machine->gpu.size()] = '\0';
  return success;
}

int nvmlDeviceGetMigMode(void*, unsigned* current, unsigned* pending) {
  const auto* const machine = emulated::this_machine();
  if (machine == nullptr) return not_found;
  *current = *pending = machine->mig ? 1 : 0;
  return success;
}

int nvmlDeviceGetNvLinkState(void* device, unsigned link, unsigned* active) {
  int end = down;
  const auto result = ask(device, link, end);
  *active = end == down ? 0 : 1;
  return result;
}

int nvmlDeviceGetNvLinkCapability(void* device, unsigned link, unsigned capability, unsigned* value) {
  int end = down;
  const auto result = ask(device, link, end);
  *value = capability == 0 ? 1 : 0;
  return result;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void* device, unsigned link, unsigned* type) {
  int end = down;
  const auto result = ask(device, link, end);
  *type = end >= 0 ? remote_gpu : end == to_switch ? remote_switch : remote_unknown;
  return result;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned link, void* info) {
  auto* const pci = static_cast<PciInfo*>(info);
  int end = down;
  const auto result = ask(device, link, end);
  if (result != success) return result;
  if (end == down) return not_supported;
  *pci = {};
  if (end == to_hidden) {
    pci->domain = pci->bus = pci->device = 0xffffffffU;
    std::strcpy(pci->busId, "FFFFFFFF:FFFFFFFF:FFFFFFFF.0");
    return success;
  }
  const auto* const machine = emulated::this_machine();
  const std::string text(end >= 0 ? machine->addresses.at(static_cast<std::size_t>(end)) : "00000000:05:00.0");
  std::memcpy(pci->busId, text.c_str(), text.size() + 1);
  const auto place = end >= 0 ? machine->place(static_cast<std::size_t>(end)) : emulated::Machine::Place{0, 5, 0};
  pci->domain = place.domain;
  pci->bus = place.bus;
  pci->device = place.device;
  return success;
}

int nvmlDeviceGetTopologyCommonAncestor(void* one, void* two, unsigned* level) {
  const auto* const machine = emulated::this_machine();
  if (machine == nullptr) return not_found;
  *level = static_cast<unsigned>(machine->ancestor(gpu_of(one), gpu_of(two)));
  return success;
}

int nvmlDeviceGetP2PStatus(void* one, void* two, unsigned, unsigned* status) {
  const auto* const machine = emulated::this_machine();
  if (machine == nullptr) return not_found;
  *status = machine->has_peer_access(gpu_of(one), gpu_of(two)) ? p2p_ok : p2p_chipset_not_supported;
  return success;
}

}  // extern "C"
