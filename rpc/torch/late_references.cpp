#include "rpc/torch/late_references.h"

#include <torch/csrc/distributed/rpc/python_remote_call.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>
#include <torch/csrc/distributed/rpc/script_remote_call.h>

#include <utility>

namespace tensorferry::torch_rpc {

namespace rpc = torch::distributed::rpc;

std::optional<ReferenceId> reference_created_by(const rpc::Message& message) {
  if (message.type() == rpc::PYTHON_REMOTE_CALL)
    return ReferenceId::fromIValue(rpc::PythonRemoteCall::fromMessage(message)->retForkId());
  if (message.type() == rpc::SCRIPT_REMOTE_CALL) return rpc::ScriptRemoteCall::fromMessage(message)->retForkId();
  return std::nullopt;
}

std::optional<ReferenceId> reference_deleted_by(const rpc::Message& message) {
  if (message.type() != rpc::RREF_USER_DELETE) return std::nullopt;
  return rpc::RRefUserDelete::fromMessage(message)->forkId();
}

void LateReferences::add(const ReferenceId& reference) {
  const std::lock_guard lock(mutex_);
  held_.try_emplace(reference);
}

bool LateReferences::empty() {
  const std::lock_guard lock(mutex_);
  return held_.empty();
}

bool LateReferences::hold(const ReferenceId& reference, std::function<void()> send) {
  const std::lock_guard lock(mutex_);
  const auto found = held_.find(reference);
  if (found == held_.end()) return false;
  found->second.push_back(std::move(send));
  return true;
}

std::vector<std::function<void()>> LateReferences::remove(const ReferenceId& reference) {
  const std::lock_guard lock(mutex_);
  const auto found = held_.find(reference);
  if (found == held_.end()) return {};
  auto held = std::move(found->second);
  held_.erase(found);
  return held;
}

}  // namespace tensorferry::torch_rpc
