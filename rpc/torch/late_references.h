/// Holds back the deletion of a remote reference while the call that creates it still runs at the owner.
///
/// The creating call may time out at its caller, and the program may then drop the reference. torch's owner counts the
/// reference only when the function has returned, and ignores a deletion that comes before. Without this class the
/// owner would keep the value for ever.
#pragma once

#include <torch/csrc/distributed/rpc/types.h>

#include <functional>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "rpc/torch/message.h"

namespace tensorferry::torch_rpc {

/// A user's reference, by the id that its owner counts.
using ReferenceId = torch::distributed::rpc::ForkId;

/// Returns the reference that the message creates at its callee; nullopt if it creates none.
std::optional<ReferenceId> reference_created_by(const torch::distributed::rpc::Message& message);
/// Returns the reference that the message deletes at its owner; nullopt if it deletes none.
std::optional<ReferenceId> reference_deleted_by(const torch::distributed::rpc::Message& message);

/// The references whose creating calls have timed out and were not answered yet. Thread-safe.
class LateReferences final {
 public:
  /// The creating call has timed out. Call it before the program hears of the time-out.
  void add(const ReferenceId& reference);
  [[nodiscard]] bool empty();
  /// Keeps `send` until the creating call has been answered. False: the reference is not late, so the caller sends.
  bool hold(const ReferenceId& reference, std::function<void()> send);
  /// The creating call has ended. Returns what was held back, in order; the caller runs it.
  [[nodiscard]] std::vector<std::function<void()>> remove(const ReferenceId& reference);

 private:
  std::mutex mutex_;
  std::unordered_map<ReferenceId, std::vector<std::function<void()>>, ReferenceId::Hash> held_;
};

}  // namespace tensorferry::torch_rpc
