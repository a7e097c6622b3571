/// The kernels of the emulated devices: those of rpc/collectives/cuda, as the host's compiler makes them.
#pragma once

#include <string_view>

#include "rpc/collectives/cuda/flag_arguments.h"

namespace emulated {

/// Runs a whole grid.
using ReduceKernel = void (*)(const tensorferry::collectives::cuda::ReduceArguments&);
/// Runs one block of `blocks`, each of so many threads. Blocks wait for those of other ranks.
using FlagKernel = void (*)(const tensorferry::collectives::cuda::FlagArguments&, unsigned block, unsigned blocks,
                            unsigned threads);
struct Kernels {
  ReduceKernel reduce;
  FlagKernel one_shot, two_shot, exchange, reduce_pieces;
};

/// An image of a kernel, which the emulated NVRTC writes and the emulated driver loads, is this text, then the type of
/// the elements, a line's end, the combination, and a null byte.
inline constexpr std::string_view image_head = "emulated kernel\n";

/// Returns the kernels for these types; null if there are none.
const Kernels* kernels_of(std::string_view element, std::string_view combination);

}  // namespace emulated
