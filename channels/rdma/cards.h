/// The RDMA cards of this host: their usable ports, and which of them are near a GPU.
///
/// What libibverbs does not say (the kind of a GID, the place on the PCI bus) comes from the card's folder in sysfs.
/// Nothing here keeps a device open. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "channels/channel.h"
#include "channels/rdma/options.h"
#include "channels/rdma/verbs.h"

namespace tensorferry::rdma {

/// How packets with a GID travel.
enum class GidKind : std::uint8_t { infiniband, roce_v1, roce_v2 };
/// Returns "InfiniBand", "RoCE v1" or "RoCE v2".
std::string_view name_of(GidKind kind) noexcept;

/// A 16-byte address of a port. On RoCE it is an IPv6 address; an IPv4 address a.b.c.d is ::ffff:a.b.c.d.
using Gid = std::array<std::uint8_t, 16>;
/// Returns whether routers forward the address: neither link-local (fe80::/10, 169.254.0.0/16) nor zero.
bool routable(const Gid& gid) noexcept;
/// Returns whether the GID holds an IPv4 address. A port reaches only GIDs of its own family.
bool is_ipv4(const Gid& gid) noexcept;
/// Returns the address as text: "10.98.0.1" or "fe80:0:0:0:5054:ff:fe12:3456".
std::string text_of(const Gid& gid);

/// One active port of a card, with the GID by which peers reach it.
struct CardPort {
  std::string device;       // the card's name: "mlx5_0"
  std::uint8_t number = 1;  // ports count from 1
  GidKind kind = GidKind::infiniband;
  std::uint8_t gid_index = 0;
  Gid gid{};
  std::uint16_t lid = 0;  // InfiniBand: the address in the subnet; 0 on Ethernet
  ibv_mtu mtu = IBV_MTU_1024;
  double gigabits = 0;   // per second, each way; 0: unknown
  int numa_node = -1;    // -1: unknown, or a host with one node
  std::string pci_path;  // the card's folder in sysfs, without symbolic links; "" if it is on no bus (Soft-RoCE)
};

/// Returns the usable ports, in the order of `options.devices`, else in that of libibverbs. A port is usable if it is
/// active, makes RC queue pairs (so no iWARP), and has a GID that is not zero. The GID is that of
/// `options.gid_index`, else the best one: RoCE v2 before v1, routable before link-local, IPv4 before IPv6, a low index
/// before a high one. On InfiniBand it is index 0.
///
/// Returns a Refusal if there is none. It says why: no library, no device, no rights to a device, each port's state, or
/// that `options` leaves out every port. Opens and closes each device, which takes about 1 ms.
std::variant<std::vector<CardPort>, Refusal> usable_ports(const Options& options);

/// Returns the folder in sysfs, without symbolic links, of the PCI device at `bus_id` ("0000:3b:00.0", in any case of
/// letters, also with the domain as 8 digits, as CUDA prints it). "" if there is none.
std::string pci_path_of(std::string_view bus_id, const std::string& sysfs = "/sys");
/// Returns the folder of the PCI device of a card whose folder is `card` ("/sys/class/infiniband/mlx5_0"); "" if it is
/// on no PCI bus.
std::string pci_path_of_card(const std::string& card);
/// Returns the NUMA node of the device with the folder `pci_path`; -1 if it is unknown.
int numa_node_of(const std::string& pci_path);

/// Returns how far apart two PCI devices are, by their folders in sysfs: the links from each up to the switch or root
/// complex that they share. Below different root complexes it is larger than any such number, and larger still if the
/// NUMA nodes differ, or if a folder is empty.
int distance(const std::string& one, const std::string& other);

/// Returns those of `ports` that are nearest to the device with the folder `pci_path`: all at the shortest distance, in
/// their order. If `pci_path` is empty, all. A program with several GPUs at one distance spreads them over the result.
std::vector<CardPort> nearest(const std::vector<CardPort>& ports, const std::string& pci_path);

}  // namespace tensorferry::rdma
