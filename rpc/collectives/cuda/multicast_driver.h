/// The driver's functions for multicast objects. Drivers from CUDA 12.1 on have them, so they stand apart from the
/// table without which no cuda channel works (channels/cuda/api.h).
#pragma once

#include <cuda.h>

#include <string>

namespace tensorferry::collectives::cuda {

/// Driver functions, named as in cuda.h without the prefix.
struct MulticastDriver {
  decltype(&::cuMulticastGetGranularity) get_granularity = nullptr;
  decltype(&::cuMulticastCreate) create = nullptr;
  decltype(&::cuMulticastAddDevice) add_device = nullptr;
  decltype(&::cuMulticastBindMem) bind_memory = nullptr;
  decltype(&::cuMulticastUnbind) unbind = nullptr;
  decltype(&::cuMemGetAllocationGranularity) get_allocation_granularity = nullptr;
  bool complete = false;  // none of them is null

  /// Returns the functions. The first call looks them up. Thread-safe.
  static const MulticastDriver& of_this_process();

  /// Returns why there is no multicast between the GPU `device` of this process and others, as far as this process can
  /// tell; empty if nothing speaks against it. Creates nothing on the device. First come the environment's variables,
  /// so a process in which multicast is turned off asks the driver nothing about it.
  static std::string why_not(int device);
};

}  // namespace tensorferry::collectives::cuda
