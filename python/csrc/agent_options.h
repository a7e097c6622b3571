/// Reads the options of an agent from a Python dict.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "agent/agent.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Converts a device's type number and index.
Device device_of(const std::pair<int, int>& device);
Milliseconds milliseconds(double seconds);

/// Makes the options of an agent. `given` has fields of RawAgentOptions by their names, with times in seconds, and
/// "gpus", the indices of the GPUs that tensors may be on. None, and a missing key, mean the default. "device_maps" and
/// "world_size" are skipped. The channels registered in this process are among those of the agent. InvalidArgument: a
/// name is registered twice. TypeError: `given` has another key, or a value of a wrong type.
RawAgentOptions options_of(const std::string& name, int rank, std::shared_ptr<Store> store, const py::dict& given);

}  // namespace tensorferry::python
