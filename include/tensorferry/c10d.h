/// torch.distributed from C++: the backend "tensorferry" as a c10d::Backend, and data-parallel training on it. Link
/// tensorferry::c10d; for tensors on GPUs also tensorferry::cuda.
///
///     auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
///     auto group = tensorferry::make_process_group(store, rank, size);
///     tensorferry::broadcast_coalesced(group, parameters, 0);
///     auto hook = tensorferry::all_reduce_hook(group);
///     for (...) {
///       model.forward(batch).backward();
///       tensorferry::reduce_gradients(parameters, *hook);
///       optimizer.step();
///     }
///
/// Tensors on GPUs stay there if the ranks reach one another's memory. Results are valid in the order of the stream
/// that is current at Work::wait(). Errors of operations are c10::DistBackendError, as of every backend of c10d.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "tensorferry/agent.h"

namespace tensorferry {

/// Options of make_process_group(). They mean the same as in Python's tensorferry.c10d.Options. All ranks give the
/// same, except for `host`. The variables of Gloo that Python reads (TORCH_GLOO_LAZY_INIT, ...) are not read here.
struct ProcessGroupOptions {
  /// Names the group in errors, and tells groups that meet in one store apart.
  std::string name = "default";
  /// How long the formation, and each operation, may take.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// True: the ranks meet at the first operation, not in make_process_group().
  bool lazy = false;
  /// Algorithms that are prescribed, as "all_reduce=two_shot". "": TENSORFERRY_COLLECTIVES.
  std::string algorithms{};
  /// False: the ranks exchange messages even on one host.
  bool board = true;
  /// False: the ranks do not read one another's memory.
  bool memory = true;
  /// Ranks that give the same text share a host. "": those that run on one boot of a kernel do.
  std::string host{};
};

using ProcessGroupPointer = c10::intrusive_ptr<c10d::Backend>;

/// Makes the process group of the agents `names`, in the order of their ranks; `agent` is one of them. The group runs
/// the operations of tensorferry::Group on tensors of any device. Blocks until all have come, unless `options.lazy`.
/// The group keeps `agent`, which must not leave before it.
///
/// Throws c10::DistBackendError (a rank has not come in time, or has died), or InvalidArgument (the names or an option
/// make no sense).
ProcessGroupPointer make_process_group(const std::shared_ptr<Agent>& agent, std::vector<std::string> names,
                                       ProcessGroupOptions options = {});
/// Makes the process group of `size` ranks that meet in `store`; this process is `rank`. Blocks until all have come,
/// unless `options.lazy`. Throws as the other.
ProcessGroupPointer make_process_group(const std::shared_ptr<Agent>& agent,
                                       const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                       ProcessGroupOptions options = {});
/// The same with an agent of its own, which joins in `store` with `agent_options` and leaves with the group. Its
/// `store` and `rendezvous` are not used. Also throws the errors of Agent::join.
ProcessGroupPointer make_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                       ProcessGroupOptions options = {}, AgentOptions agent_options = {});

/// The gradients of some parameters in one flat buffer of the parameters' dtype. gradients[i] is a view of the buffer
/// with the shape of parameters[i]. `index` counts from 0, and the last bucket of a step says so. It is torch's own
/// class: hooks get the same kind of bucket from DistributedDataParallel and from reduce_gradients().
using GradBucket = c10d::GradBucket;
/// What a hook returns. Once complete it holds the reduced gradients: a tensor of as many elements as the buffer, often
/// the buffer itself. The caller copies them to the parameters' gradients.
using GradFuture = c10::intrusive_ptr<c10::ivalue::Future>;

/// Calls `run` for the hook `name`, and returns the future of its result as one tensor: it may be a tensor, or a list
/// of exactly one. An error of `run` or of its future gets a text that names the hook and the bucket; an error of a
/// group keeps its code, and any other error becomes a std::runtime_error.
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

/// Returns the hook that averages buckets over a group of make_process_group(), in place.
std::unique_ptr<c10d::CommHookInterface> all_reduce_hook(const ProcessGroupPointer& group);
/// Returns the hook that averages buckets as at::kHalf or at::kBFloat16, which is what travels. The sum is accumulated
/// in float32 and rounded once. A gradient beyond the range of the dtype becomes infinite.
std::unique_ptr<c10d::CommHookInterface> compress_hook(const ProcessGroupPointer& group, at::ScalarType dtype);

/// Divides tensors into buckets, each a list of indices of `tensors`. The tensors of a bucket have one dtype and at
/// most `bucket_bytes` bytes together, and lie on one device; a larger tensor has a bucket of its own. Tensors keep
/// their order within a dtype and device, and buckets are ordered by their first tensors. So ranks with the same shapes
/// have the same buckets.
std::vector<std::vector<std::size_t>> buckets_of(const std::vector<at::Tensor>& tensors, std::size_t bucket_bytes);

/// Reduces the gradients of `parameters` by a hook, without DistributedDataParallel: fills buckets (buckets_of) from
/// the gradients, runs the hook on each in order, two in flight, and copies each result into the parameters' gradients.
/// Blocks until all have ended; on a GPU, the results are valid in the order of the current stream. A parameter without
/// a gradient counts as one with zeros, and has a gradient afterwards. One that requires no gradient is left out.
///
/// Throws what the hook or its future throws, and c10::DistBackendError if a parameter is not a dense tensor, or if the
/// result has another number of elements than the bucket. No bucket is in flight afterwards, and some gradients may
/// have been reduced: the optimiser must not step. If `interrupted`, which is asked while the call waits, returns true,
/// it throws at once, and the hook's operations go on.
void reduce_gradients(const std::vector<at::Tensor>& parameters, c10d::CommHookInterface& hook,
                      std::size_t bucket_bytes = std::size_t{25} << 20, const std::function<bool()>& interrupted = {});

/// Copies the tensors of rank `root` into those of every other rank, a bucket (buckets_of) at a time: two are in
/// flight at once. Every rank gives tensors of the same shapes and dtypes, which may be strided, and the same
/// `bucket_bytes`. Blocks until all have arrived; on a GPU, until they will have in the order of the current stream.
/// Throws c10::DistBackendError; some tensors may have arrived then.
void broadcast_coalesced(const ProcessGroupPointer& group, const std::vector<at::Tensor>& tensors, std::size_t root = 0,
                         std::size_t bucket_bytes = std::size_t{25} << 20);

}  // namespace tensorferry
