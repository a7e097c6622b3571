/// Finds out the facts about this process's GPUs by which a group knows how its GPUs are joined (gpu_topology.h).
#pragma once

#include "rpc/collectives/gpu_topology.h"

namespace tensorferry::collectives::cuda {

/// Returns the facts about the GPU `device` of this process: from the driver, and its NVLinks from NVML. Asks for
/// milliseconds, without the device. Thread-safe. If NVML does not tell, GpuFacts::unknown says why.
GpuFacts facts_of(int device);

/// Returns what this process knows about the way from its GPU `device`, with the facts `own`, to another rank's. The
/// driver says whether there is peer access if this process sees both GPUs, else NVML does. Thread-safe.
PairFacts facts_between(int device, const GpuFacts& own, const GpuFacts& other);

}  // namespace tensorferry::collectives::cuda
