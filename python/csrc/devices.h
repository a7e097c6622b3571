/// Converts devices and device maps between Python's forms (torch.device, "cuda:1", 1, dicts) and the agent's.
#pragma once

#include <c10/core/Device.h>

#include "agent/agent.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Converts a torch device; a GPU without an index is GPU 0. ValueError: neither the CPU nor a GPU.
Device device_of(const c10::Device& device);
c10::Device torch_device(Device device);

/// Converts a torch.device, its text, or the index of a GPU. "cuda" is the first GPU. TypeError: another type.
/// ValueError: no such device.
Device device_of(PyObject* object);

/// Converts the argument `device=` of a call: one device, for all tensors among the arguments, or a dict of local
/// devices to the peer's. ValueError: the dict is not one to one, or has more than 64 entries.
Placement placement_of(PyObject* device);

}  // namespace tensorferry::python
