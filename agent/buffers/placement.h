/// Placement: which of the receiver's devices a tensor lands on. Pure functions.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "agent/message.h"
#include "agent/wire/frame.h"

namespace tensorferry {

/// Returns the device on which a tensor from `from` lands at a peer that has the devices `theirs`. The CPU is always
/// among them. If `placement` does not name `from`, it is the same device, else the peer's first device of that type,
/// else the CPU; in that last case `*elsewhere` becomes true, unless the pointer is null.
///
/// InvalidArgument: the placement names a device that the peer does not have.
Result<Device> arrival(Device from, const Placement& placement, std::span<const Device> theirs, std::string_view peer,
                       bool* elsewhere = nullptr);

/// Returns InvalidArgument if the map is not one to one, or has more than wire::most_placements entries.
Status check_map(const std::vector<std::pair<Device, Device>>& map);
/// Returns the placement by the inverse of the map, for the tensors of the result.
Placement reversed(const Placement& placement);

/// Returns a placement as a request carries it (wire::extension::placement). Entries past wire::most_placements are
/// cut off.
std::vector<std::pair<Device, Device>> on_wire(const Placement& placement);
/// Undoes on_wire().
Placement placement_of(const std::vector<std::pair<Device, Device>>& said);

}  // namespace tensorferry
