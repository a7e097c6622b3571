/// The arguments of the kernels of a hybrid cube mesh. NVRTC compiles this file too.
#pragma once

#include "rpc/collectives/cuda/flag_arguments.h"

namespace tensorferry::collectives::cuda {

/// The ranks of a hybrid cube mesh, and those of each of its quads.
inline constexpr unsigned mesh_ranks = 8, quad_ranks = 4;

/// What a launch gets. All ranks number the corners of the quads alike, so that partners stand at the same corner.
struct MeshArguments {
  /// `halves` and `flags` are those of this rank's quad and of its partner; the others are null. `lent` is not used. A
  /// half has a slot of `slot_bytes` for each corner.
  FlagArguments flags;
  unsigned quad[quad_ranks];     // NOLINT(modernize-avoid-c-arrays): the ranks of this rank's quad, by corner
  unsigned corner;               // this rank's
  unsigned side;                 // 0: this rank's quad is the first one; 1: it is the second one
  unsigned partner;              // the rank at this corner of the other quad
  unsigned corners[mesh_ranks];  // NOLINT(modernize-avoid-c-arrays): by rank
  bool near[mesh_ranks];         // NOLINT(modernize-avoid-c-arrays): by rank: it is in this rank's quad
};

}  // namespace tensorferry::collectives::cuda
