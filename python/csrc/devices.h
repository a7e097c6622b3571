/// torch.device, "cuda:1", 1 and device maps as the agent has them.
#pragma once

#include <c10/core/Device.h>

#include "agent/agent.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// ValueError: neither the CPU nor a GPU.
Device device_of(const c10::Device& device);
c10::Device torch_device(Device device);

/// A torch.device, its text, or the index of a GPU; "cuda" is its first. TypeError: something else.
Device device_of(PyObject* object);

/// `device=` of a call: one device, for all tensors among the arguments, or a dict of ours to the peer's, one to one.
Placement placement_of(PyObject* device);
/// The map the other way round: for what comes back.
Placement reversed(const Placement& placement);

}  // namespace tensorferry::python
