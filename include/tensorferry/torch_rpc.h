/// torch.distributed.rpc from C++: TensorFerry as a torch::distributed::rpc::RpcAgent. Link tensorferry::torch_rpc; for
/// tensors on GPUs also tensorferry::cuda.
///
///     auto agent = tensorferry::make_rpc_agent({.name = "worker0", .rank = 0, .world_size = 2});
///     torch::distributed::rpc::RpcAgent::setCurrentRpcAgent(agent);
///     torch::distributed::autograd::DistAutogradContainer::init(0);  // the rank
///     agent->setTypeResolver(resolver);                              // of the TorchScript classes that travel
///     agent->start();
///     auto reply = agent->send(agent->getWorkerInfo("worker1"), message);
///     agent->join(true);
///     agent->shutdown();
#pragma once

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <memory>

#include "tensorferry/agent.h"

namespace tensorferry {

/// Joins a job as an agent of torch's RPC, and waits for its world. `options` mean the same as for Agent::join, but
/// `prepare` is not called, and tensors of GPUs in answers go by the answering agent's `device_maps`, as those in its
/// requests do: both agents of a pair give a map. A tensor of a GPU that it lacks is an error, as with torch. Peers are
/// agents of torch's RPC in C++ or Python with the backend "tensorferry". `callback` runs the requests of peers, on
/// threads of the agent; null: torch's own for TorchScript, without Python (RequestCallbackNoPython). Requests that
/// come before start() wait for it.
///
/// Throws the errors of Agent::join. Errors of the agent's own functions are std::runtime_error; errors of a call
/// complete its future.
std::shared_ptr<torch::distributed::rpc::RpcAgent> make_rpc_agent(
    AgentOptions options, std::unique_ptr<torch::distributed::rpc::RequestCallback> callback = nullptr);

}  // namespace tensorferry
