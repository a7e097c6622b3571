/// From how many bytes on the ranks of a group on GPUs map one another's inputs, as `tensorferry tune` has measured.
#pragma once

#include <cstddef>
#include <limits>
#include <string_view>

#include "base/status.h"
#include "rpc/collectives/tuning.h"

namespace tensorferry::collectives {

/// No input is mapped, unless it is symmetric memory (cuda/symmetric_memory.h).
inline constexpr std::size_t never_mapped = std::numeric_limits<std::size_t>::max();

/// Returns the fewest bytes of an input that is mapped rather than copied, from the file of tuning.h; never_mapped if
/// the file has none for the key, or cannot be understood. Ranks may differ in it. Never throws.
std::size_t inputs_mapped_from(const TuningKey& key);

/// Finds the same in the text of such a file: the member "mapped_from" of the entry for the key, a number.
/// InvalidArgument: the text is something else.
Result<std::size_t> find_mapped_from(std::string_view json, const TuningKey& key);

}  // namespace tensorferry::collectives
