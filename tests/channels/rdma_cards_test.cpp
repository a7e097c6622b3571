// The places of cards and GPUs on the PCI bus, in trees like those of real machines, and the options of RDMA.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "channels/rdma/cards.h"

namespace tensorferry::rdma {
namespace {

/// A folder with the part of sysfs that says where PCI devices are.
class Sysfs {
 public:
  Sysfs() {
    std::string pattern = std::filesystem::temp_directory_path() / "sysfs-XXXXXX";
    root_ = ::mkdtemp(pattern.data());
    std::filesystem::create_directories(root_ / "bus/pci/devices");
    std::filesystem::create_directories(root_ / "class/infiniband");
  }
  Sysfs(const Sysfs&) = delete;
  Sysfs& operator=(const Sysfs&) = delete;
  ~Sysfs() { std::filesystem::remove_all(root_); }

  /// Adds a device below the bridges that `place` names, such as "pci0000:00/0000:00:01.1/0000:07:00.0".
  std::filesystem::path add_device(const std::string& place, int node = -1) {
    auto folder = root_ / "devices" / place;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "numa_node") << node << "\n";
    std::filesystem::create_directory_symlink(folder, root_ / "bus/pci/devices" / folder.filename());
    return folder;
  }

  /// Adds a card, and returns its port with its place.
  CardPort add_card(const std::string& name, const std::string& place, int node = -1) {
    const auto folder = add_device(place, node);
    const auto card = folder / "infiniband" / name;
    std::filesystem::create_directories(card);
    std::filesystem::create_directory_symlink("../..", card / "device");
    std::filesystem::create_directory_symlink(card, root_ / "class/infiniband" / name);
    CardPort port;
    port.device = name;
    port.pci_path = pci_path_of_card(root_ / "class/infiniband" / name);
    port.numa_node = numa_node_of(port.pci_path);
    return port;
  }

  [[nodiscard]] std::string gpu(std::string_view bus_id) const { return pci_path_of(bus_id, root_); }
  [[nodiscard]] std::string path(const std::string& below) const { return root_ / below; }

 private:
  std::filesystem::path root_;
};

std::string names_of(const std::vector<CardPort>& ports) {
  std::string names;
  for (const auto& port : ports) names += (names.empty() ? "" : " ") + port.device;
  return names;
}

TEST(RdmaCards, PairsGpusAndCardsBelowOneSwitchOnADgxA100) {
  Sysfs sysfs;
  std::vector<CardPort> ports;
  // Two GPUs and two cards are below each switch; the two switches of a socket have root complexes of their own.
  const struct {
    const char* gpus[2];
    const char* cards[2];
    const char* root;
    int node;
  } switches[] = {{{"07", "0f"}, {"0c", "12"}, "00", 3},
                  {{"47", "4e"}, {"4b", "54"}, "40", 1},
                  {{"87", "90"}, {"8d", "94"}, "80", 7},
                  {{"b7", "bd"}, {"ba", "cc"}, "a0", 5}};
  int card = 0;
  for (const auto& one : switches) {
    const auto root = std::string(one.root);
    const auto upper = "pci0000:" + root + "/0000:" + root + ":01.1/0000:" + root.substr(0, 1) + "1:00.0";
    for (int at = 0; at < 2; ++at) {
      const auto branch = upper + "/0000:" + root.substr(0, 1) + "2:0" + std::to_string(4 * at) + ".0";
      sysfs.add_device(branch + "/0000:" + one.gpus[at] + ":00.0", one.node);
      ports.push_back(
          sysfs.add_card("mlx5_" + std::to_string(card++), branch + "/0000:" + one.cards[at] + ":00.0", one.node));
    }
  }
  EXPECT_EQ(names_of(nearest(ports, sysfs.gpu("0000:07:00.0"))), "mlx5_0");
  EXPECT_EQ(names_of(nearest(ports, sysfs.gpu("0000:0F:00.0"))), "mlx5_1");
  EXPECT_EQ(names_of(nearest(ports, sysfs.gpu("0000:90:00.0"))), "mlx5_5");
  EXPECT_EQ(names_of(nearest(ports, sysfs.gpu("0000:b7:00.0"))), "mlx5_6");
  // Were its own card down, the GPU would go by the other one of its switch.
  ports.erase(ports.begin());
  EXPECT_EQ(names_of(nearest(ports, sysfs.gpu("0000:07:00.0"))), "mlx5_1");
}

TEST(RdmaCards, PairsEachGpuWithItsCardOnAnHgxH100) {
  Sysfs sysfs;
  std::vector<CardPort> ports;
  const char* const roots[] = {"15", "37", "48", "59", "97", "b7", "c8", "d9"};
  std::vector<std::string> gpus;
  for (int at = 0; at < 8; ++at) {
    const std::string root = roots[at];
    const auto upper = "pci0000:" + root + "/0000:" + root + ":01.0/0000:" + std::to_string(10 + at) + ":00.0";
    const auto lower = [&](int slot) {
      return upper + "/0000:2" + std::to_string(at) + ":0" + std::to_string(slot) + ".0";
    };
    gpus.push_back("0000:3" + std::to_string(at) + ":00.0");
    sysfs.add_device(lower(0) + "/" + gpus.back(), at / 4);
    ports.push_back(
        sysfs.add_card("mlx5_" + std::to_string(at), lower(1) + "/0000:4" + std::to_string(at) + ":00.0", at / 4));
  }
  // A card for storage, on the first socket.
  ports.push_back(sysfs.add_card("mlx5_8", "pci0000:60/0000:60:01.0/0000:61:00.0", 0));
  for (std::size_t at = 0; at < gpus.size(); ++at) {
    EXPECT_EQ(names_of(nearest(ports, sysfs.gpu(gpus[at]))), "mlx5_" + std::to_string(at));
  }
}

TEST(RdmaCards, FallsBackToTheNumaNodeWhenACloudVmHidesTheSwitches) {
  Sysfs sysfs;
  std::vector<CardPort> ports;
  // Each passed-through device has a root complex of its own below the hypervisor's bus.
  for (int at = 0; at < 4; ++at) {
    const auto number = std::to_string(at + 1);
    const auto domain = "000" + number;
    sysfs.add_device("LNXSYSTM:00/VMBUS:00/gpu" + number + "/pci" + domain + ":00/" + domain + ":00:00.0", at / 2);
    ports.push_back(sysfs.add_card(
        "mlx5_ib" + std::to_string(at),
        "LNXSYSTM:00/VMBUS:00/card" + number + "/pci010" + number + ":00/010" + number + ":00:00.0", at / 2));
  }
  EXPECT_EQ(names_of(nearest(ports, sysfs.gpu("00000001:00:00.0"))), "mlx5_ib0 mlx5_ib1");
  EXPECT_EQ(names_of(nearest(ports, sysfs.gpu("00000004:00:00.0"))), "mlx5_ib2 mlx5_ib3");
}

TEST(RdmaCards, TakesTheOnlyCardOfAWorkstation) {
  Sysfs sysfs;
  sysfs.add_device("pci0000:00/0000:00:01.0/0000:01:00.0");
  const std::vector<CardPort> ports = {sysfs.add_card("mlx4_0", "pci0000:00/0000:00:1c.0/0000:04:00.0")};
  EXPECT_EQ(names_of(nearest(ports, sysfs.gpu("0000:01:00.0"))), "mlx4_0");
  EXPECT_EQ(distance(ports[0].pci_path, sysfs.gpu("0000:01:00.0")), 4);
}

TEST(RdmaCards, PrefersADeviceBelowTheSameSwitchToOneAtTheRootComplex) {
  Sysfs sysfs;
  sysfs.add_device("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0");
  const std::vector<CardPort> ports = {
      sysfs.add_card("far", "pci0000:00/0000:00:02.0/0000:05:00.0"),
      sysfs.add_card("near", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0")};
  EXPECT_EQ(names_of(nearest(ports, sysfs.gpu("0000:03:00.0"))), "near");
}

TEST(RdmaCards, ReturnsEveryPortForADeviceThatIsOnNoBus) {
  Sysfs sysfs;
  const std::vector<CardPort> ports = {sysfs.add_card("one", "pci0000:00/0000:00:01.0/0000:01:00.0", 0),
                                       sysfs.add_card("two", "pci0000:80/0000:80:01.0/0000:81:00.0", 1)};
  EXPECT_EQ(names_of(nearest(ports, sysfs.gpu("0000:99:00.0"))), "one two");
  EXPECT_EQ(names_of(nearest(ports, "")), "one two");
  EXPECT_EQ(sysfs.gpu("../../.."), "");
  std::filesystem::create_directories(sysfs.path("devices/virtual/infiniband/rxe0"));
  EXPECT_EQ(pci_path_of_card(sysfs.path("devices/virtual/infiniband/rxe0")), "");
  EXPECT_EQ(numa_node_of(ports[1].pci_path), 1);
}

Gid gid_of(std::initializer_list<int> front, std::initializer_list<int> back) {
  Gid gid{};
  std::copy(front.begin(), front.end(), gid.begin());
  std::copy(back.begin(), back.end(), gid.end() - static_cast<std::ptrdiff_t>(back.size()));
  return gid;
}

TEST(RdmaGid, KnowsWhichAddressesRoutersForward) {
  EXPECT_TRUE(routable(gid_of({}, {0xff, 0xff, 10, 98, 0, 1})));
  EXPECT_FALSE(routable(gid_of({}, {0xff, 0xff, 169, 254, 0, 1})));
  EXPECT_TRUE(routable(gid_of({0x20, 0x01, 0x0d, 0xb8}, {1})));
  EXPECT_FALSE(routable(gid_of({0xfe, 0x80}, {0x50, 0x54, 0, 1})));
  EXPECT_FALSE(routable(Gid{}));
  EXPECT_TRUE(is_ipv4(gid_of({}, {0xff, 0xff, 10, 98, 0, 1})));
  EXPECT_FALSE(is_ipv4(gid_of({0xfe, 0x80}, {0xff, 0xff, 1, 2, 3, 4})));
  EXPECT_EQ(text_of(gid_of({}, {0xff, 0xff, 10, 98, 0, 1})), "10.98.0.1");
  EXPECT_EQ(text_of(gid_of({0xfe, 0x80}, {0x12, 0x34})), "fe80:0:0:0:0:0:0:1234");
}

/// Sets a variable until the end of its scope.
class VariableSet {
 public:
  VariableSet(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  VariableSet(const VariableSet&) = delete;
  VariableSet& operator=(const VariableSet&) = delete;
  ~VariableSet() { ::unsetenv(name_); }

 private:
  const char* name_;
};

TEST(RdmaOptions, ReadSizesWithUnitsFromTheEnvironment) {
  const VariableSet stripe("TENSORFERRY_RDMA_STRIPE", "4M"), pinned("TENSORFERRY_RDMA_PINNED", "2G"),
      level("TENSORFERRY_RDMA_SERVICE_LEVEL", "3"), devices("TENSORFERRY_RDMA_DEVICES", "mlx5_1:2");
  const auto options = Options::from_environment();
  ASSERT_TRUE(options.ok()) << options.status().text();
  EXPECT_EQ(options->stripe_bytes, std::size_t{4} << 20);
  EXPECT_EQ(options->pinned_bytes, std::uint64_t{2} << 30);
  EXPECT_EQ(options->service_level, 3);
  EXPECT_EQ(options->devices, "mlx5_1:2");
  EXPECT_EQ(options->gid_index, -1);
}

TEST(RdmaOptions, NameTheVariableWhoseValueIsWrong) {
  const std::pair<const char*, const char*> wrong[] = {
      {"TENSORFERRY_RDMA_SERVICE_LEVEL", "16"}, {"TENSORFERRY_RDMA_QUEUE_DEPTH", "0"},
      {"TENSORFERRY_RDMA_STRIPE", "4T"},        {"TENSORFERRY_RDMA_PINNED", "99999999999G"},
      {"TENSORFERRY_RDMA_GID_INDEX", "3K"},     {"TENSORFERRY_RDMA_TRAFFIC_CLASS", "-1"},
      {"TENSORFERRY_RDMA_TIMEOUT", "32"}};
  for (const auto& [name, value] : wrong) {
    const VariableSet variable(name, value);
    const auto options = Options::from_environment();
    ASSERT_FALSE(options.ok()) << name;
    EXPECT_NE(options.status().what().find(name), std::string_view::npos) << options.status().text();
  }
}

}  // namespace
}  // namespace tensorferry::rdma
