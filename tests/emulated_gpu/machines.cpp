#include "tests/emulated_gpu/machines.h"

#include <algorithm>
#include <cstdlib>

namespace emulated {
namespace {

/// Two sockets with four GPUs each, two of which share a PCIe switch.
std::vector<std::vector<int>> two_sockets() {
  std::vector<std::vector<int>> out(8, std::vector<int>(8, 50));
  for (std::size_t one = 0; one < 8; ++one) {
    for (std::size_t two = 0; two < 8; ++two) {
      if (one / 4 == two / 4) out[one][two] = one / 2 == two / 2 ? 10 : 30;
    }
  }
  return out;
}

std::vector<Machine> make() {
  return {
      {.name = "dgx-h100",
       .gpu = "NVIDIA H100 80GB HBM3",
       .addresses = {"00000000:1B:00.0", "00000000:43:00.0", "00000000:52:00.0", "00000000:61:00.0", "00000000:9D:00.0",
                     "00000000:C3:00.0", "00000000:D1:00.0", "00000000:DF:00.0"},
       .links = 18,
       .switch_links = 18},
      {.name = "dgx-a100",
       .gpu = "NVIDIA A100-SXM4-40GB",
       .addresses = {"00000000:07:00.0", "00000000:0F:00.0", "00000000:47:00.0", "00000000:4E:00.0", "00000000:87:00.0",
                     "00000000:90:00.0", "00000000:B7:00.0", "00000000:BD:00.0"},
       .links = 12,
       .switch_links = 12},
      {.name = "hgx-a100-4",
       .gpu = "NVIDIA A100-SXM4-80GB",
       .addresses = {"00000000:03:00.0", "00000000:41:00.0", "00000000:82:00.0", "00000000:C1:00.0"},
       .links = 12,
       .between = {{0, 4, 4, 4}, {4, 0, 4, 4}, {4, 4, 0, 4}, {4, 4, 4, 0}}},
      {.name = "dgx-1v",
       .gpu = "Tesla V100-SXM2-16GB",
       .addresses = {"00000000:06:00.0", "00000000:07:00.0", "00000000:0A:00.0", "00000000:0B:00.0", "00000000:85:00.0",
                     "00000000:86:00.0", "00000000:89:00.0", "00000000:8A:00.0"},
       .links = 6,
       .between = {{0, 1, 1, 2, 2, 0, 0, 0},
                   {1, 0, 2, 1, 0, 2, 0, 0},
                   {1, 2, 0, 2, 0, 0, 1, 0},
                   {2, 1, 2, 0, 0, 0, 0, 1},
                   {2, 0, 0, 0, 0, 1, 1, 2},
                   {0, 2, 0, 0, 1, 0, 2, 1},
                   {0, 0, 1, 0, 1, 2, 0, 2},
                   {0, 0, 0, 1, 2, 1, 2, 0}},
       .peers = {{1, 1, 1, 1, 1, 0, 0, 0},
                 {1, 1, 1, 1, 0, 1, 0, 0},
                 {1, 1, 1, 1, 0, 0, 1, 0},
                 {1, 1, 1, 1, 0, 0, 0, 1},
                 {1, 0, 0, 0, 1, 1, 1, 1},
                 {0, 1, 0, 0, 1, 1, 1, 1},
                 {0, 0, 1, 0, 1, 1, 1, 1},
                 {0, 0, 0, 1, 1, 1, 1, 1}},
       .ancestors = two_sockets()},
      {.name = "workstation",
       .gpu = "NVIDIA RTX A6000",
       .addresses = {"00000000:17:00.0", "00000000:65:00.0"},
       .links = 4,
       .ancestors = {{0, 30}, {30, 0}}},
      {.name = "bridged-pairs",  // two NVLink bridges, each over two of the four GPUs
       .gpu = "NVIDIA A40",
       .addresses = {"00000000:01:00.0", "00000000:25:00.0", "00000000:81:00.0", "00000000:A5:00.0"},
       .links = 4,
       .between = {{0, 4, 0, 0}, {4, 0, 0, 0}, {0, 0, 0, 4}, {0, 0, 4, 0}}},
      {.name = "cloud-t4",
       .gpu = "Tesla T4",
       .addresses = {"00000000:00:1B.0", "00000000:00:1C.0", "00000000:00:1D.0", "00000000:00:1E.0"},
       .peers = {{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}},
       .ancestors = {{0, 30, 30, 30}, {30, 0, 30, 30}, {30, 30, 0, 30}, {30, 30, 30, 0}}},
      {.name = "cloud-a100",  // a virtual machine that has the switches' links, and not the switches
       .gpu = "NVIDIA A100-SXM4-40GB",
       .addresses = {"00000001:00:00.0", "00000002:00:00.0", "00000003:00:00.0", "00000004:00:00.0", "0000000B:00:00.0",
                     "0000000C:00:00.0", "0000000D:00:00.0", "0000000E:00:00.0"},
       .links = 12,
       .hidden_links = 12},
      {.name = "mig",
       .gpu = "NVIDIA A100-SXM4-40GB",
       .addresses = {"00000000:07:00.0", "00000000:0F:00.0"},
       .links = 12,
       .switch_links = 12,
       .peers = {{1, 0}, {0, 1}},
       .mig = true},
  };
}

}  // namespace

Machine::Place Machine::place(std::size_t index) const {
  constexpr int hexadecimal = 16;
  const std::string text(addresses.at(index));
  const auto number = [&](std::size_t at) {
    return static_cast<unsigned>(std::strtoul(text.c_str() + at, nullptr, hexadecimal));
  };
  return {number(0), number(text.find(':') + 1), number(text.rfind(':') + 1)};
}

const std::vector<Machine>& machines() {
  static const auto& all = *new std::vector<Machine>(make());
  return all;
}

const Machine* this_machine() {
  const auto* const wanted = std::getenv("EMULATED_MACHINE");
  if (wanted == nullptr) return nullptr;
  const auto& all = machines();
  const auto it = std::find_if(all.begin(), all.end(), [&](const Machine& each) { return each.name == wanted; });
  return it == all.end() ? nullptr : &*it;
}

}  // namespace emulated
