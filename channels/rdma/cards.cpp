#include "channels/rdma/cards.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "base/text.h"

namespace tensorferry::rdma {
namespace {

/// Returns the first line of a file of sysfs, or "" if it cannot be read: an unused row of a table, for one.
std::string line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string without_links(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr), &std::free);
  return real == nullptr ? std::string() : std::string(real.get());
}

template <class Number>
std::optional<Number> number_in(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  return number;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const auto end = std::min(text.find(separator), text.size());
    if (end > 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

/// One word of Options::devices: a card, and a port of it or 0 for all.
struct Selection {
  std::string_view device;
  int port = 0;
};

std::vector<Selection> selections(std::string_view devices) {
  std::vector<Selection> chosen;
  for (auto word : split(devices, ',')) {
    while (!word.empty() && word.front() == ' ') word.remove_prefix(1);
    while (!word.empty() && word.back() == ' ') word.remove_suffix(1);
    const auto colon = std::min(word.find(':'), word.size());
    Selection one{word.substr(0, colon)};
    if (colon < word.size()) one.port = number_in<int>(word.substr(colon + 1)).value_or(-1);  // -1: no port has it
    if (!one.device.empty()) chosen.push_back(one);
  }
  return chosen;
}

/// Returns the place of a port in the order of preference, or nullopt if the selection leaves it out.
std::optional<std::size_t> place_of(const std::vector<Selection>& chosen, std::string_view device, int port) {
  if (chosen.empty()) return 0;
  for (std::size_t place = 0; place < chosen.size(); ++place) {
    if (chosen[place].device == device && (chosen[place].port == 0 || chosen[place].port == port)) return place;
  }
  return std::nullopt;
}

bool is_zero(const Gid& gid) {
  // An unused row is zero, or has the prefix of link-local addresses and nothing behind it.
  return std::all_of(gid.begin() + 8, gid.end(), [](auto byte) { return byte == 0; });
}

std::string_view state_name(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN:
      return "down (no link)";
    case IBV_PORT_INIT:
      return "initialising (no subnet manager has configured it)";
    case IBV_PORT_ARMED:
      return "armed (the subnet manager has not activated it)";
    case IBV_PORT_ACTIVE:
    case IBV_PORT_ACTIVE_DEFER:
      return "active";
    default:
      return "in no known state";
  }
}

/// Collects the usable ports of one opened device, and a reason for each other one.
class Survey {
 public:
  Survey(const Verbs& verbs, const Options& options, const std::vector<Selection>& chosen)
      : verbs_(verbs), options_(options), chosen_(chosen) {}

  void add(ibv_device* device) {
    const std::string name = verbs_.get_device_name(device);
    seen_.push_back(name);
    if (!chosen_.empty() &&
        std::none_of(chosen_.begin(), chosen_.end(), [&](const Selection& one) { return one.device == name; })) {
      return;
    }
    if (device->transport_type != IBV_TRANSPORT_IB) {
      reasons_.push_back(formatted("{} makes no RC queue pairs over InfiniBand or RoCE", name));
      return;
    }
    errno = 0;
    ibv_context* const context = verbs_.open_device(device);
    if (context == nullptr) {
      reasons_.push_back(cannot_open(name, device->dev_name, errno));
      return;
    }
    add_ports(*device, name, context);
    verbs_.close_device(context);
  }

  std::variant<std::vector<CardPort>, Refusal> result() {
    if (!ports_.empty()) {
      std::stable_sort(ports_.begin(), ports_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      std::vector<CardPort> ports;
      for (auto& [place, port] : ports_) ports.push_back(std::move(port));
      return ports;
    }
    if (seen_.empty()) return Refusal{"there is no RDMA device on this host (libibverbs lists none)"};
    if (reasons_.empty()) {
      return Refusal{
          formatted("no RDMA port is left by devices=\"{}\"; this host has {}", options_.devices, joined(seen_, ", "))};
    }
    return Refusal{formatted("no RDMA port is usable: {}", joined(reasons_, "; "))};
  }

 private:
  static std::string cannot_open(const std::string& name, const char* node, int error) {
    const auto why = error == 0 ? std::string("no provider of libibverbs drives it: install ibverbs-providers")
                                : std::generic_category().message(error);
    if (error != EACCES && error != EPERM) return formatted("{} does not open ({})", name, why);
    return formatted("{} does not open: this user may not use /dev/infiniband/{} ({}). Allow reading and writing it",
                     name, node, why);
  }

  void add_ports(const ibv_device& device, const std::string& name, ibv_context* context) {
    ibv_device_attr attributes{};
    if (const int error = verbs_.query_device(context, &attributes); error != 0) {
      reasons_.push_back(formatted("{} cannot be queried ({})", name, std::generic_category().message(error)));
      return;
    }
    const std::string folder = device.ibdev_path;
    const auto pci_path = pci_path_of_card(folder);
    for (int number = 1; number <= attributes.phys_port_cnt; ++number) {
      const auto place = place_of(chosen_, name, number);
      if (!place) continue;
      CardPort port;
      port.device = name;
      port.number = static_cast<std::uint8_t>(number);
      port.pci_path = pci_path;
      port.numa_node = numa_node_of(pci_path);
      if (auto reason = fill(port, folder, context); reason.empty()) {
        ports_.emplace_back(*place, std::move(port));
      } else {
        reasons_.push_back(std::move(reason));
      }
    }
  }

  /// Returns why the port is not usable; "" if it is.
  std::string fill(CardPort& port, const std::string& folder, ibv_context* context) {
    const auto named = formatted("{}:{}", port.device, port.number);
    ibv_port_attr attributes{};
    if (const int error = query_port(verbs_, context, port.number, attributes); error != 0) {
      return formatted("{} cannot be queried ({})", named, std::generic_category().message(error));
    }
    if (attributes.state != IBV_PORT_ACTIVE && attributes.state != IBV_PORT_ACTIVE_DEFER) {
      return formatted("{} is {}", named, state_name(attributes.state));
    }
    port.mtu = attributes.active_mtu;
    const auto sysfs = formatted("{}/ports/{}", folder, port.number);
    // "100 Gb/sec (4X EDR)". The field active_speed has no number for the newest speeds.
    port.gigabits = std::atof(line_of(sysfs + "/rate").c_str());
    const bool ethernet = attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
    if (!ethernet) port.lid = attributes.lid;
    if (!choose_gid(port, sysfs, attributes.gid_tbl_len, ethernet, context)) {
      if (options_.gid_index >= 0) return formatted("{} has no GID at index {}", named, options_.gid_index);
      return formatted("{} has no GID: give its network interface an address", named);
    }
    return {};
  }

  bool choose_gid(CardPort& port, const std::string& sysfs, int rows, bool ethernet, ibv_context* context) {
    const int first = std::max(options_.gid_index, 0);
    const int last = options_.gid_index >= 0 ? options_.gid_index : ethernet ? rows - 1 : 0;
    int best = -1;
    for (int index = first; index <= std::min({last, rows - 1, UINT8_MAX}); ++index) {
      ibv_gid raw{};
      if (verbs_.query_gid(context, port.number, index, &raw) != 0) continue;
      Gid gid{};
      std::memcpy(gid.data(), raw.raw, gid.size());
      const auto kind = kind_of(sysfs, index, ethernet);
      if (is_zero(gid) || !kind) continue;
      const int rank = 1 + (*kind == GidKind::roce_v2 ? 4 : 0) + (routable(gid) ? 2 : 0) + (is_ipv4(gid) ? 1 : 0);
      if (rank <= best) continue;
      best = rank;
      port.kind = *kind;
      port.gid = gid;
      port.gid_index = static_cast<std::uint8_t>(index);
    }
    return best > 0;
  }

  static std::optional<GidKind> kind_of(const std::string& sysfs, int index, bool ethernet) {
    if (!ethernet) return GidKind::infiniband;
    const auto type = line_of(formatted("{}/gid_attrs/types/{}", sysfs, index));
    if (type == "RoCE v2") return GidKind::roce_v2;
    if (type == "IB/RoCE v1") return GidKind::roce_v1;
    return std::nullopt;
  }

  const Verbs& verbs_;
  const Options& options_;
  const std::vector<Selection>& chosen_;
  std::vector<std::pair<std::size_t, CardPort>> ports_;  // with their places in the order of preference
  std::vector<std::string> seen_;
  std::vector<std::string> reasons_;
};

}  // namespace

std::string_view name_of(GidKind kind) noexcept {
  switch (kind) {
    case GidKind::infiniband:
      return "InfiniBand";
    case GidKind::roce_v1:
      return "RoCE v1";
    case GidKind::roce_v2:
      return "RoCE v2";
  }
  return "";
}

bool is_ipv4(const Gid& gid) noexcept {
  return std::all_of(gid.begin(), gid.begin() + 10, [](auto byte) { return byte == 0; }) && gid[10] == 0xff &&
         gid[11] == 0xff;
}

bool routable(const Gid& gid) noexcept {
  if (is_ipv4(gid)) return gid[12] != 0 && !(gid[12] == 169 && gid[13] == 254);
  const bool link_local = gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
  return !link_local && std::any_of(gid.begin(), gid.end(), [](auto byte) { return byte != 0; });
}

std::string text_of(const Gid& gid) {
  if (is_ipv4(gid)) return formatted("{}.{}.{}.{}", gid[12], gid[13], gid[14], gid[15]);
  std::string text;
  for (std::size_t at = 0; at < gid.size(); at += 2) {
    if (at > 0) text += ':';
    text += hex(static_cast<std::uint64_t>(gid[at]) << 8 | gid[at + 1]);
  }
  return text;
}

std::variant<std::vector<CardPort>, Refusal> usable_ports(const Options& options) {
  const Verbs* const library = verbs();
  if (library == nullptr) return Refusal{why_missing()};
  int count = 0;
  errno = 0;
  ibv_device** const devices = library->get_device_list(&count);
  if (devices == nullptr) {
    if (errno == ENOSYS || errno == 0) return Refusal{"the kernel has no RDMA (the module ib_uverbs is not loaded)"};
    return Refusal{formatted("RDMA devices cannot be listed ({})", std::generic_category().message(errno))};
  }
  const auto chosen = selections(options.devices);
  Survey survey(*library, options, chosen);
  for (int at = 0; at < count; ++at) survey.add(devices[at]);
  library->free_device_list(devices);
  return survey.result();
}

std::string pci_path_of(std::string_view bus_id, const std::string& sysfs) {
  std::string name(bus_id);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](char letter) { return letter >= 'A' && letter <= 'F' ? static_cast<char>(letter + 32) : letter; });
  // sysfs writes a domain with four digits unless it needs more.
  while (name.find(':') > 4 && name.find(':') != std::string::npos && name.front() == '0') name.erase(0, 1);
  if (name.empty() || name.find('/') != std::string::npos) return {};
  return without_links(sysfs + "/bus/pci/devices/" + name);
}

std::string pci_path_of_card(const std::string& card) {
  const auto path = without_links(card + "/device");
  return path.find("/pci") == std::string::npos ? std::string() : path;
}

int numa_node_of(const std::string& pci_path) {
  return pci_path.empty() ? -1 : number_in<int>(line_of(pci_path + "/numa_node")).value_or(-1);
}

int distance(const std::string& one, const std::string& other) {
  constexpr int other_root = 1000, other_node = 2000, unknown = 3000;
  if (one.empty() || other.empty()) return unknown;
  const auto mine = split(one, '/');
  const auto theirs = split(other, '/');
  const auto fork = std::mismatch(mine.begin(), mine.end(), theirs.begin(), theirs.end()).first;
  const bool share_root =
      std::any_of(mine.begin(), fork, [](std::string_view folder) { return folder.substr(0, 3) == "pci"; });
  if (!share_root) return numa_node_of(one) == numa_node_of(other) ? other_root : other_node;
  const auto shared = static_cast<std::size_t>(fork - mine.begin());
  return static_cast<int>(mine.size() - shared + theirs.size() - shared);
}

std::vector<CardPort> nearest(const std::vector<CardPort>& ports, const std::string& pci_path) {
  if (pci_path.empty()) return ports;
  int shortest = INT_MAX;
  for (const auto& port : ports) shortest = std::min(shortest, distance(pci_path, port.pci_path));
  std::vector<CardPort> near;
  for (const auto& port : ports) {
    if (distance(pci_path, port.pci_path) == shortest) near.push_back(port);
  }
  return near;
}

}  // namespace tensorferry::rdma
