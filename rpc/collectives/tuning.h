/// The file in which `tensorferry tune` keeps the crossings of algorithms that it has measured on this machine.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tensorferry::collectives {

/// What crossings are measured for. They hold for no other group.
struct TuningKey {
  std::string topology;  // how the ranks are joined: "one host", or name_of(GpuTopology)
  std::string device;    // the name of the processor, or of the GPUs
  std::size_t ranks = 0;
  std::string version;  // of TensorFerry
  bool operator==(const TuningKey&) const = default;
};
/// Returns the key of groups whose ranks share this host and read one another's memory.
TuningKey host_tuning_key(std::size_t ranks);
/// Returns the key of groups whose ranks reach one another's GPUs.
TuningKey gpu_tuning_key(std::string_view topology, std::string device, std::size_t ranks);

/// Returns the path of the file: TENSORFERRY_TUNING, or tensorferry/tuning.json in the user's folder of configuration.
/// Empty: the user has no such folder.
std::string tuning_file();

/// Returns the crossings that the file has for the key, as parse_crossings() takes them; empty if it has none. A file
/// that cannot be read or understood is logged as a warning, and counts as empty. Never throws.
std::string tuned_for(const TuningKey& key);

/// Finds the crossings for the key in the text of such a file: a JSON object whose "measured" is a list of objects with
/// the members of TuningKey, and "crossings", an object with a text for each operation. Other members are passed over.
/// Of several entries for the key the last counts. InvalidArgument: the text is something else.
Result<std::string> find_crossings(std::string_view json, const TuningKey& key);

}  // namespace tensorferry::collectives
