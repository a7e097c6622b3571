/// What NVML, the driver's management library, tells about NVLinks and PCIe. It is loaded at run time, as libcuda is,
/// and its header is not needed to build. NVML sees all GPUs of the host (in a container, all of the container's), also
/// those that CUDA_VISIBLE_DEVICES hides.
#pragma once

#include "rpc/collectives/gpu_topology.h"

namespace tensorferry::collectives::cuda {

/// Adds the name and the NVLinks of the GPU at `facts.pci`; or, as GpuFacts::unknown, why NVML does not tell them: the
/// library or one of its functions is missing, it fails, or MIG divides the GPU. Thread-safe.
void add_facts_of_nvml(GpuFacts& facts);

/// Returns what NVML says about the way between two GPUs; unknown if it does not tell. Thread-safe.
PairFacts pair_facts_of_nvml(const PciAddress& from, const PciAddress& to);

}  // namespace tensorferry::collectives::cuda
