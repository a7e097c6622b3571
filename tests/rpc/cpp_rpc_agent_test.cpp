/// Agents of torch.distributed.rpc in C++ (tensorferry/torch_rpc.h), two in one process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tensorferry/errors.h"
#include "tensorferry/torch_rpc.h"

namespace tensorferry::testing {
namespace {

namespace rpc = torch::distributed::rpc;

AgentOptions options_of(const std::shared_ptr<Store>& store, int rank) {
  AgentOptions options;
  options.name = "worker" + std::to_string(rank);
  options.rank = rank;
  options.world_size = 2;
  options.store = store;
  return options;
}

/// Finds no classes of TorchScript: the values of these tests are tensors.
c10::StrongTypePtr no_class(const c10::QualifiedName& name) {
  throw std::runtime_error("there is no class " + name.qualifiedName());
}

c10::intrusive_ptr<rpc::Message> sum_of(const at::Tensor& a, const at::Tensor& b) {
  const auto add = torch::jit::findOperatorFor({"aten::add", "Tensor"});
  return rpc::ScriptCall(add, {a, b, 1}).toMessage();
}

TEST(CppRpcAgent, RunsOperatorsOfTorchAtItsPeer) {
  const auto store = local_store();
  auto other = std::async(std::launch::async, [&] { return make_rpc_agent(options_of(store, 1)); });
  const auto mine = make_rpc_agent(options_of(store, 0));
  const auto theirs = other.get();
  rpc::RpcAgent::setCurrentRpcAgent(theirs);  // torch's callback asks it for the context of its references
  torch::distributed::autograd::DistAutogradContainer::init(0);
  for (const auto& agent : {mine, theirs}) agent->setTypeResolver(std::make_shared<rpc::TypeResolver>(&no_class));
  mine->start();
  theirs->start();

  const auto& to = mine->getWorkerInfo("worker1");
  auto reply = mine->send(to, sum_of(at::ones({3}), at::full({3}, 2.0)));
  reply->waitAndThrow();
  const auto answer = rpc::ScriptResp::fromMessage(*reply->value().toCustomClass<rpc::Message>());
  EXPECT_TRUE(at::equal(answer->value().toTensor(), at::full({3}, 3.0)));

  auto refused = mine->send(to, sum_of(at::ones({3}), at::ones({4})));
  EXPECT_THROW(refused->waitAndThrow(), std::exception);

  auto left = std::async(std::launch::async, [&] { theirs->join(true); });
  mine->join(true);
  left.get();
  mine->shutdown();
  theirs->shutdown();
  rpc::RpcAgent::setCurrentRpcAgent(nullptr);
}

TEST(CppRpcAgent, NeedsARank) {
  AgentOptions options;
  options.name = "worker";
  options.store = local_store();
  EXPECT_THROW(make_rpc_agent(std::move(options)), InvalidArgument);
}

}  // namespace
}  // namespace tensorferry::testing
