/// Data-parallel training on a group: tensors broadcast in buckets, and communication hooks, which say what is done
/// with a bucket of gradients. The interface of hooks is torch's (torch/csrc/distributed/c10d/comm.hpp), so a hook runs
/// in torch's DistributedDataParallel and, without it, in reduce_gradients().
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "rpc/collectives/torch/device_group.h"
#include "tensorferry/c10d.h"

namespace tensorferry::collectives {

using Interrupted = std::function<bool()>;

/// The error of a group where torch's interfaces need an exception. Python sees torch.distributed.DistBackendError.
class GroupError final : public c10::DistBackendError {
 public:
  explicit GroupError(Status status);
  [[nodiscard]] const Status& status() const noexcept { return status_; }

 private:
  Status status_;
};

/// Copies the tensors of rank `root` into those of every other rank, a bucket (buckets_of) at a time: two are in flight
/// at once. Every rank gives tensors of the same shapes and dtypes, which may be strided, and the same `bucket_bytes`.
/// Blocks until all have arrived; on a GPU, until they will have in the order of the current stream.
///
/// InvalidArgument, before anything is sent, if a group does not take a tensor; other errors are those of
/// TensorGroup::broadcast. After an error some tensors may have arrived. If `interrupted`, which is asked while the
/// call waits, returns true, the result is Cancelled. `timeout` is for each bucket; 0: the group's.
Status broadcast_coalesced(const DeviceGroup& group, const TensorGroup::Tensors& tensors, std::size_t root,
                           std::size_t bucket_bytes, Milliseconds timeout = Milliseconds{0},
                           const Interrupted& interrupted = {});

using GroupHook = CommHook<std::shared_ptr<DeviceGroup>>;

/// Averages the buckets over the group, in place.
std::unique_ptr<GroupHook> all_reduce_hook(std::shared_ptr<DeviceGroup> group);
/// Averages the buckets over the group as at::kHalf or at::kBFloat16, which is what travels. The sum is accumulated in
/// float32 and rounded once. A gradient beyond the range of the dtype becomes infinite.
std::unique_ptr<GroupHook> compress_hook(std::shared_ptr<DeviceGroup> group, at::ScalarType dtype);

}  // namespace tensorferry::collectives
