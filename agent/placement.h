/// On which of a peer's devices a tensor lands.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "agent/agent.h"
#include "agent/wire/frame.h"

namespace tensorferry {

/// Where a tensor on `from` lands at a peer that has the devices `theirs`. `elsewhere`, where given, is set where that
/// is no device of the same type although nothing asked for it. InvalidArgument: the placement names a device that the
/// peer does not have.
Result<Device> arrival(Device from, const Placement& placement, std::span<const Device> theirs, std::string_view peer,
                       bool* elsewhere = nullptr);

/// A placement as a request carries it (wire::extension::placement), and back.
std::vector<std::pair<Device, Device>> on_wire(const Placement& placement);
Placement placement_of(const std::vector<std::pair<Device, Device>>& said);

}  // namespace tensorferry
