/// Two agents of torch.distributed.rpc in one process (tensorferry/torch_rpc.h), and an operator that one runs at the
/// other.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "tensorferry/torch_rpc.h"

namespace tensorferry::testing {

/// "worker0", which calls, and "worker1". The constructor joins both, and the destructor leaves with both.
class TorchRpcPair {
 public:
  using Agent = torch::distributed::rpc::RpcAgent;

  /// The options need neither a name nor a rank, world or store.
  TorchRpcPair(AgentOptions caller, AgentOptions callee) {
    const auto store = local_store();
    auto other = std::async(std::launch::async, [&] { return join(std::move(callee), store, 1); });
    caller_ = join(std::move(caller), store, 0);
    callee_ = other.get();
    Agent::setCurrentRpcAgent(callee_);  // torch's callback asks it for the context of its references
    torch::distributed::autograd::DistAutogradContainer::init(0);
    for (const auto& agent : {caller_, callee_}) {
      agent->setTypeResolver(std::make_shared<torch::distributed::rpc::TypeResolver>(&no_class));
      agent->start();
    }
  }
  ~TorchRpcPair() {
    auto left = std::async(std::launch::async, [&] { callee_->join(true); });
    caller_->join(true);
    left.get();
    caller_->shutdown();
    callee_->shutdown();
    Agent::setCurrentRpcAgent(nullptr);
  }
  TorchRpcPair(const TorchRpcPair&) = delete;
  TorchRpcPair& operator=(const TorchRpcPair&) = delete;

  /// Adds two tensors at the callee. Throws its error.
  at::Tensor sum(const at::Tensor& a, const at::Tensor& b) {
    const auto add = torch::jit::findOperatorFor({"aten::add", "Tensor"});
    auto reply = caller_->send(caller_->getWorkerInfo("worker1"),
                               torch::distributed::rpc::ScriptCall(add, {a, b, 1}).toMessage());
    reply->waitAndThrow();
    const auto message = reply->value().toCustomClass<torch::distributed::rpc::Message>();
    return torch::distributed::rpc::ScriptResp::fromMessage(*message)->value().toTensor();
  }

 private:
  static std::shared_ptr<Agent> join(AgentOptions options, std::shared_ptr<Store> store, int rank) {
    options.name = "worker" + std::to_string(rank);
    options.rank = rank;
    options.world_size = 2;
    options.store = std::move(store);
    return make_rpc_agent(std::move(options));
  }
  /// Finds no classes of TorchScript: the values are tensors.
  static c10::StrongTypePtr no_class(const c10::QualifiedName& name) {
    throw std::runtime_error("there is no class " + name.qualifiedName());
  }

  std::shared_ptr<Agent> caller_, callee_;
};

}  // namespace tensorferry::testing
