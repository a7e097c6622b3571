/// GPUs for agents of C++ programs: at::Tensors on GPUs as arguments and results. Link tensorferry::cuda.
///
///     auto agent = tensorferry::Agent::join({.name = "sim", .devices = tensorferry::gpus()});
///     agent->serve("scale", [](const at::Tensor& tensor, double by) { return tensor * by; });
///
/// Order of streams. A tensor is sent behind the work that its device's current stream has been given at the call, or
/// when the served function returns; its memory may be written again in the order of that stream once the future has
/// completed. A received tensor is valid in the order of the current stream of the thread that reads it: the thread
/// that calls Future::get(), or that runs the served function. A served function runs on streams of its own
/// arguments, so its work waits for no other call's. No call waits for a GPU on the host.
#pragma once

#include <vector>

#include "tensorferry/agent.h"
#include "tensorferry/torch.h"

namespace tensorferry {

/// Returns these GPUs of this process for AgentOptions::devices, by their indices; all if `indices` is empty. Null if
/// it has none. Creates no CUDA context. Throws InvalidArgument if there is no GPU of an index.
Devices gpus(const std::vector<int>& indices = {});

}  // namespace tensorferry
