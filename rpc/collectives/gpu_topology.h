/// How the GPUs of a group are joined. Each rank finds out the facts about its own GPU (cuda/nvml.h) and tells the
/// others; all ranks then decide the same from the same facts. This file knows no library of CUDA.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tensorferry::collectives {

/// Where a device lies on the PCI buses of its host.
struct PciAddress {
  std::uint32_t domain = 0;
  std::uint32_t bus = 0;
  std::uint32_t device = 0;
  bool operator==(const PciAddress&) const = default;
};
/// Returns the address as NVML writes it: "00000000:1B:00.0".
std::string text_of(const PciAddress& address);

/// What an NVLink of a GPU leads to.
enum class LinkEnd : std::uint8_t {
  nothing = 0,    // the GPU has no such link, or it is down
  gpu = 1,        // the GPU at NvLink::at
  nv_switch = 2,  // an NVSwitch
  other = 3,      // a CPU, or a link without peer access
  hidden = 4,     // a device that NVML does not name: a virtual machine hides its switches
};
struct NvLink {
  LinkEnd end = LinkEnd::nothing;
  PciAddress at;
};

/// A text of bounded size, so that a record of facts is plain bytes. A longer text is cut off.
template <std::size_t size>
struct FixedText {
  std::array<char, size> bytes{};
  FixedText() = default;
  template <std::convertible_to<std::string_view> Text>
  FixedText(const Text& text) {  // NOLINT(google-explicit-constructor): a text is what it stands for
    std::string_view(text).substr(0, size - 1).copy(bytes.data(), size - 1);
  }
  /// Returns the text, also if another process has written the bytes.
  [[nodiscard]] std::string text() const {
    const std::string_view all(bytes.data(), size);
    return std::string(all.substr(0, all.find('\0')));
  }
};

/// What one rank knows about its own GPU. Plain bytes.
struct GpuFacts {
  static constexpr std::size_t most_links = 36;
  std::array<char, 16> uuid{};
  PciAddress pci;
  FixedText<64> name;  // "NVIDIA H100 80GB HBM3"
  /// Why the links are not known: NVML is missing, or the GPU is divided by MIG. Empty: they are known.
  FixedText<160> unknown;
  std::array<NvLink, most_links> links{};
};

/// What one rank knows about the way from its own GPU to that of another rank. Plain bytes.
struct PairFacts {
  enum class PeerAccess : std::uint8_t { unknown = 0, no = 1, yes = 2 };
  PeerAccess peer_access = PeerAccess::unknown;
  /// The level of PCIe at which the ways of both GPUs meet, as NVML numbers it: 0 one board, 10 one switch, 20 several
  /// switches, 30 a host bridge, 40 a NUMA node, 50 the whole host. 255: unknown.
  std::uint8_t common_ancestor = 255;
};

/// How the GPUs of a group reach one another.
enum class GpuTopology : std::uint8_t {
  unknown = 0,    // NVML does not tell
  one_gpu = 1,    // all ranks have the same GPU
  nv_switch = 2,  // every GPU has NVLinks to switches
  full_mesh = 3,  // NVLinks join each two GPUs
  pcie = 4,       // peer access between each two GPUs, and no NVLink between some of them
  none = 5,       // two of the GPUs have no peer access
};
/// Returns the name by which people and stored crossings know it: "NVSwitch", "full mesh", "PCIe".
std::string_view name_of(GpuTopology topology) noexcept;

/// A topology, and what it was decided by, for people: "18 NVLinks of each GPU lead to switches".
struct JoinedGpus {
  GpuTopology topology = GpuTopology::unknown;
  std::string reason;
};

/// Decides how GPUs are joined. `gpus` has the facts of each rank; `pairs` has ranks * ranks entries, those of a rank
/// behind one another. Ranks may share a GPU: each GPU counts once. Pure: the same facts give the same result at every
/// rank, and no order of the ranks changes the topology. A fact that two ranks contradict counts as the worse of both.
JoinedGpus joined_gpus(std::span<const GpuFacts> gpus, std::span<const PairFacts> pairs);

/// How the ranks of a group share GPUs and processes.
enum class RankPlacement : std::uint8_t {
  gpu_each,         // each rank has a GPU of its own
  some_share,       // some ranks have a GPU in common, and others have another one
  one_gpu,          // all ranks have the same GPU, and each rank is a process
  one_gpu_threads,  // all ranks have the same GPU, and some of them are threads of one process
};
/// Returns how ranks lie whose GPUs have these UUIDs. `apart`: each rank is a process of its own.
RankPlacement placement_of(std::span<const GpuFacts> gpus, bool apart);

}  // namespace tensorferry::collectives
