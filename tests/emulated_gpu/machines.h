/// Machines whose GPUs are known: how NVLinks and PCIe join them, as `nvidia-smi topo -m` and `nvidia-smi nvlink -R`
/// print it there. The emulated NVML replays the machine that EMULATED_MACHINE names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace emulated {

struct Machine {
  std::string_view name;                    // as in EMULATED_MACHINE
  std::string_view gpu;                     // the name of its GPUs
  std::vector<std::string_view> addresses;  // "00000000:1B:00.0", by GPU
  int links = 0;                            // of a GPU, up or down; 0: it supports no NVLink
  int switch_links = 0;                     // of each GPU, to NVSwitches
  int hidden_links = 0;                     // of each GPU, to devices that the machine hides
  /// The number of NVLinks between two GPUs, by GPU and GPU; empty: none.
  std::vector<std::vector<int>> between{};
  /// Whether GPUs have peer access; empty: each two have.
  std::vector<std::vector<int>> peers{};
  /// NVML's level of PCIe at which the ways of two GPUs meet; empty: 50, the whole host.
  std::vector<std::vector<int>> ancestors{};
  bool mig = false;

  [[nodiscard]] int links_between(std::size_t one, std::size_t two) const {
    return between.empty() ? 0 : between[one][two];
  }
  [[nodiscard]] bool has_peer_access(std::size_t one, std::size_t two) const {
    return peers.empty() || peers[one][two] != 0;
  }
  [[nodiscard]] int ancestor(std::size_t one, std::size_t two) const {
    return ancestors.empty() ? 50 : ancestors[one][two];
  }
  /// Returns the three numbers of an address, which are hexadecimal: domain, bus, device.
  struct Place {
    unsigned domain = 0, bus = 0, device = 0;
  };
  [[nodiscard]] Place place(std::size_t index) const;
};

const std::vector<Machine>& machines();
/// Returns the machine that EMULATED_MACHINE names at this moment; null if it names none.
const Machine* this_machine();

}  // namespace emulated
