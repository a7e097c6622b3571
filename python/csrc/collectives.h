/// Groups of agents, for tensorferry.collectives and the backend of torch.distributed.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>

#include "python/csrc/interpreter.h"
#include "rpc/collectives/raw_group.h"
#include "rpc/collectives/torch/device_group.h"

namespace tensorferry::python {

/// Returns a time-out in seconds as milliseconds. Raises ValueError if it is negative.
std::chrono::milliseconds milliseconds_of(double seconds);

/// Returns the options of an operation with a time-out in seconds; nullopt: the group's. Raises ValueError if it is
/// negative.
collectives::StartOptions options_of(std::optional<double> timeout);

/// Reduces `count` elements of `other` into `accumulator` by a Python function of two tensors. Needs the GIL. Throws
/// what the function raises.
void reduce_by(const py::function& function, void* accumulator, const void* other, std::size_t count, DType dtype);

/// Drops `last` without the GIL, if this thread holds it: a group that ends tells its other ranks, and lets go of
/// tensors.
template <class Pointer>
void drop_without_gil(Pointer last) {
  if (closing() || PyGILState_Check() == 0) return;  // the caller's frame drops it
  const GilReleased released;
  last = {};
}

/// Shares a group whose last owner drops it without the GIL.
std::shared_ptr<collectives::DeviceGroup> shared_without_gil(std::shared_ptr<collectives::DeviceGroup> group);

void bind_collectives(py::module_& module);

}  // namespace tensorferry::python
