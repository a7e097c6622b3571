#include "agent/buffers/placement.h"

#include <algorithm>
#include <string>

#include "base/text.h"

namespace tensorferry {

Result<Device> arrival(Device from, const Placement& placement, std::span<const Device> theirs, std::string_view peer,
                       bool* elsewhere) {
  const auto has = [theirs](Device device) { return std::find(theirs.begin(), theirs.end(), device) != theirs.end(); };
  const auto wanted = placement.find(from);
  if (const auto device = wanted.value_or(from); device == Device() || has(device)) return device;
  if (wanted) {
    std::string all;
    for (const auto device : theirs) all += (all.empty() ? "" : ", ") + text_of(device);
    return Status(Code::invalid_argument, "a tensor cannot land on " + text_of(*wanted) + " of \"" + std::string(peer) +
                                              "\", which has " + (all.empty() ? "cpu" : all));
  }
  const auto first =
      std::find_if(theirs.begin(), theirs.end(), [from](Device device) { return device.type == from.type; });
  if (first != theirs.end()) return *first;
  if (elsewhere != nullptr) *elsewhere = true;
  return Device();
}

Status check_map(const std::vector<std::pair<Device, Device>>& map) {
  if (map.size() > wire::most_placements)
    return {Code::invalid_argument, formatted("a device map has at most {} entries", wire::most_placements)};
  for (auto one = map.begin(); one != map.end(); ++one) {
    for (auto other = map.begin(); other != one; ++other) {
      if (one->first != other->first && one->second != other->second) continue;
      return {Code::invalid_argument,
              formatted("a device map is one to one: {} to {} and {} to {} cannot both be", text_of(other->first),
                        text_of(other->second), text_of(one->first), text_of(one->second))};
    }
  }
  return {};
}

Placement reversed(const Placement& placement) {
  Placement back;
  for (const auto& [from, to] : placement.map) back.map.emplace_back(to, from);
  return back;
}

std::vector<std::pair<Device, Device>> on_wire(const Placement& placement) {
  if (placement.all) return {{wire::any_device, *placement.all}};
  auto said = placement.map;
  said.resize(std::min(said.size(), wire::most_placements));
  return said;
}

Placement placement_of(const std::vector<std::pair<Device, Device>>& said) {
  Placement placement;
  for (const auto& [from, to] : said) {
    if (from == wire::any_device) placement.all = to;
  }
  if (!placement.all) placement.map = said;
  return placement;
}

}  // namespace tensorferry
