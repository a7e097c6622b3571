/// The arguments of the reduction kernel. NVRTC compiles this file too.
#pragma once

#include <cstddef>

namespace tensorferry::collectives::cuda {

/// The most ranks that a kernel reduces.
inline constexpr unsigned most_ranks = 16;

/// What a launch gets. `inputs` has an address for each of the `ranks`, in their order. The kernel reduces `count`
/// elements of each into `out`, and into `copy` too unless it is null. Both may be one of the inputs; none may overlap
/// another input otherwise.
struct ReduceArguments {
  const void* inputs[most_ranks];  // NOLINT(modernize-avoid-c-arrays): NVRTC has no std::array
  void* out;
  void* copy;
  std::size_t count;
  double factor;  // of a premultiplied sum
  unsigned ranks;
};

}  // namespace tensorferry::collectives::cuda
