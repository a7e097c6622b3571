#include "rpc/torch/backward_passes.h"

#include <torch/csrc/distributed/autograd/rpc_messages/propagate_gradients_req.h>

namespace tensorferry::torch_rpc {

namespace rpc = torch::distributed::rpc;

std::shared_ptr<BackwardPasses::Request> BackwardPasses::enter(const rpc::Message& message) {
  if (message.type() != rpc::BACKWARD_AUTOGRAD_REQ) return nullptr;
  const auto gradients = torch::distributed::autograd::PropagateGradientsReq::fromMessage(message);
  const auto context = gradients->getAutogradMetadata().autogradContextId;
  std::unique_lock lock(mutex_);
  auto& pass = passes_[context];  // stays there as long as it has requests
  const bool first = ++pass.requests == 1;
  if (!first) changed_.wait(lock, [&] { return pass.prepared; });
  return std::make_shared<Request>(*this, context, first);
}

void BackwardPasses::prepared(std::int64_t context) {
  const std::lock_guard lock(mutex_);
  passes_.at(context).prepared = true;
  changed_.notify_all();
}

void BackwardPasses::end(std::int64_t context) {
  const std::lock_guard lock(mutex_);
  const auto pass = passes_.find(context);
  if (--pass->second.requests == 0) passes_.erase(pass);
}

}  // namespace tensorferry::torch_rpc
