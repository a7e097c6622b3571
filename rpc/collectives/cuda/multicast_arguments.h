/// The arguments of the kernels whose reduction the switch does. NVRTC compiles this file too.
#pragma once

#include "rpc/collectives/cuda/flag_arguments.h"

namespace tensorferry::collectives::cuda {

/// What a launch gets. The ranks meet by the flags, epochs and words of `flags`, whose `halves` and `lent` are not
/// used. In their place stand two halves behind one another in the memory that the ranks have bound to a multicast
/// object.
struct MulticastArguments {
  FlagArguments flags;
  void* own;               // the halves of this rank, for ordinary loads and stores
  void* all;               // those of all ranks, at a multicast address
  std::size_t half_bytes;  // a multiple of 16
};

}  // namespace tensorferry::collectives::cuda
