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

namespace tensorferry::collectives {

/// The gradients of some parameters in one flat buffer of the parameters' dtype. gradients[i] is a view of the buffer
/// with the shape of parameters[i]. `index` counts from 0, and the last bucket of a step says so. It is torch's own
/// class: hooks get the same kind of bucket from DistributedDataParallel and from reduce_gradients().
using GradBucket = c10d::GradBucket;
/// What a hook returns. Once complete it holds the reduced gradients: a tensor of as many elements as the buffer, often
/// the buffer itself. The caller copies them to the parameters' gradients.
using GradFuture = c10::intrusive_ptr<c10::ivalue::Future>;
using Interrupted = std::function<bool()>;

/// The error of a group where torch's interfaces need an exception. Python sees torch.distributed.DistBackendError.
class GroupError final : public c10::DistBackendError {
 public:
  explicit GroupError(Status status);
  [[nodiscard]] const Status& status() const noexcept { return status_; }

 private:
  Status status_;
};

/// Divides tensors into buckets, each a list of indices of `tensors`. The tensors of a bucket have one dtype and at
/// most `bucket_bytes` bytes together, and lie on one device; a larger tensor has a bucket of its own. Tensors keep
/// their order within a dtype and device, and buckets are ordered by their first tensors. So ranks with the same shapes
/// have the same buckets.
std::vector<std::vector<std::size_t>> buckets_of(const TensorGroup::Tensors& tensors, std::size_t bucket_bytes);

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

/// Calls `run` for the hook `name`, and returns the future of its result as one tensor: it may be a tensor, or a list
/// of exactly one. An error of `run` or of its future gets a text that names the hook and the bucket; a GroupError
/// keeps its code, and any other error becomes a std::runtime_error.
GradFuture run_hook(const std::string& name, const GradBucket& bucket, const std::function<GradFuture()>& run);

/// A communication hook in C++: a function over a state of its own.
///
///   CommHook<int> twice("twice", 2, [](int& factor, GradBucket& bucket) { ... return future; });
///   reduce_gradients(parameters, twice);
///   reducer.register_comm_hook(std::make_unique<CommHook<int>>(...));  // c10d::Reducer
///
/// The errors of its function name the hook and the bucket (run_hook). Threads: called by one at a time, in the order
/// of the buckets.
template <class State>
class CommHook final : public c10d::CppCommHookInterface<State> {
 public:
  using Run = std::function<GradFuture(State&, GradBucket&)>;
  CommHook(std::string name, State state, Run run)
      : c10d::CppCommHookInterface<State>(std::move(state)), name_(std::move(name)), run_(std::move(run)) {}

  GradFuture runHook(GradBucket& bucket) override {
    return run_hook(name_, bucket, [&] { return run_(this->state_, bucket); });
  }
  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  const std::string name_;
  const Run run_;
};

using GroupHook = CommHook<std::shared_ptr<DeviceGroup>>;

/// Averages the buckets over the group, in place.
std::unique_ptr<GroupHook> all_reduce_hook(std::shared_ptr<DeviceGroup> group);
/// Averages the buckets over the group as at::kHalf or at::kBFloat16, which is what travels. The sum is accumulated in
/// float32 and rounded once. A gradient beyond the range of the dtype becomes infinite.
std::unique_ptr<GroupHook> compress_hook(std::shared_ptr<DeviceGroup> group, at::ScalarType dtype);

/// Reduces the gradients of `parameters` by a hook, without DistributedDataParallel: fills buckets (buckets_of) from
/// the gradients, runs the hook on each in order, two in flight, and copies each result into the parameters' gradients.
/// Blocks until all have ended; on a GPU, the results are valid in the order of the current stream. A parameter without
/// a gradient counts as one with zeros, and has a gradient afterwards. One that requires no gradient is left out.
///
/// Throws what the hook or its future throws, and a GroupError of InvalidArgument if a parameter is not a dense tensor,
/// or if the result has another number of elements than the bucket. No bucket is in flight afterwards, and
/// some gradients may have been reduced: the optimiser must not step. If `interrupted`, which is asked while the call
/// waits, returns true, it throws a GroupError of Cancelled at once, and the hook's operations go on.
void reduce_gradients(const TensorGroup::Tensors& parameters, c10d::CommHookInterface& hook,
                      std::size_t bucket_bytes = std::size_t{25} << 20, const Interrupted& interrupted = {});

}  // namespace tensorferry::collectives
