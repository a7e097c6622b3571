/// The backend "tensorferry" of torch.distributed. Tensors of GPUs stay there if the ranks reach one another's memory;
/// those of other devices are copied to host memory and back.
#pragma once

#include <torch/headeronly/version.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "rpc/collectives/groups.h"
#include "rpc/collectives/torch/device_group.h"
#include "rpc/collectives/torch/returning.h"

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
#define TENSORFERRY_COMPLETION_HOOKS 1
#endif

namespace tensorferry::regions {
class RegionService;
}

namespace tensorferry::collectives {

class TorchWindow;

/// The options of a process group: `pg_options` of torch.distributed.
struct TorchGroupOptions final : c10d::Backend::Options {
  TorchGroupOptions() : Options("tensorferry") { settings.label.clear(); }
  c10::intrusive_ptr<Options> clone() const { return copy(); }  // overrides one that torch 2.11 lacks
  [[nodiscard]] c10::intrusive_ptr<TorchGroupOptions> copy() const {
    return c10::make_intrusive<TorchGroupOptions>(*this);
  }

  bool lazy = false;  // the first operation forms the group
  /// How the group is formed. `label` "": torch's name of the group. The process group sets `key`. `timeout` is not
  /// used: that of torch's options takes its place.
  GroupSettings settings;
  /// Returns the one-sided memory of the agent, for windows; null if the agent has gone. Whoever makes the process
  /// group sets it, and the parts of the group inherit it.
  std::function<std::shared_ptr<regions::RegionService>()> regions;
  // For the agent that the backend makes if the process has none. "" and 0: the agent's defaults.
  std::string interface;
  std::size_t max_threads = 0;
};

#ifdef TENSORFERRY_COMPLETION_HOOKS
/// The hooks that torch's flight recorder waits for. Thread-safe. No hook runs under its lock.
class CompletionHooks final {
 public:
  void add(std::int64_t id, c10d::CompletionHook hook);
  void remove(std::int64_t id);
  /// Calls the hooks when `work` ends without an error, with the time since now. `self` is kept until then.
  static void watch(const std::shared_ptr<CompletionHooks>& self, GroupWork& work, std::uint64_t key);

 private:
  std::mutex mutex_;
  std::map<std::int64_t, c10d::CompletionHook> hooks_;
};
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
/// The hooks by which a program sees that the group has failed, before it gets the error. Thread-safe. No hook runs
/// under its lock.
class AbortHooks final {
 public:
  void add(std::int64_t id, c10d::AbortHook hook);
  void remove(std::int64_t id);
  /// Drops all hooks: one may keep its process group.
  void clear();
  /// Calls the hooks, in the order of their ids. Logs what one throws. Does nothing after keep_tensors_from_now().
  void run();
  /// Calls the hooks before `work` of `group` ends, if the group has failed then.
  static void watch(const std::shared_ptr<AbortHooks>& self, RawGroup& group, GroupWork& work);

 private:
  using Shared = std::shared_ptr<const c10d::AbortHook>;  // to copy a function of Python takes the GIL
  std::mutex mutex_;
  std::map<std::int64_t, Shared> hooks_;
};
#endif

/// An operation of the backend. Errors become c10d::DistBackendError, at the call or in the work. Results on a device
/// are valid in the order of the streams that were current at wait(), and of those of the future's callbacks.
///
/// If GPUs do the operation among themselves, wait() without a time-out returns when the operation has been enqueued on
/// them, and so the future completes. isCompleted() and wait() with a time-out ask the device. If the operation fails
/// there later, isSuccess() and exception() tell, and each later operation of the group throws the error.
class TorchWork final : public c10d::Work {
 public:
  TorchWork(std::shared_ptr<GroupWork> work, const TorchAccess& access, c10d::OpType type, const char* title,
            std::vector<std::vector<at::Tensor>> results, const std::vector<at::Tensor>& inputs, std::uint64_t sequence,
            std::uint64_t key, std::chrono::milliseconds timeout);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// The rank that a receive has received from. Throws for all else.
  int sourceRank() const override;
  /// Throws before the operation has ended (on a GPU: has been enqueued), and if it has failed.
  std::vector<at::Tensor> result() override;
  /// Waits without the GIL, which torch's bindings release. `timeout` 0: until the operation's own. Throws what a
  /// signal handler raises meanwhile (interruptions.h); if this thread runs the operation, that ends it and fails the
  /// group.
  bool wait(std::chrono::milliseconds timeout) override;
  /// Work that the current stream gets next runs after the results, also if isCompleted() has said that they are there.
  /// Does nothing before the operation has been enqueued: torch's binding keeps the GIL, so this must not wait.
  void synchronize() override {
    if (work_.group_work()->done()) wait(kNoTimeout);
  }
  /// Ends a send or a receive; the message of a receive stays for the next one. Throws for operations of all ranks.
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  /// The milliseconds from time_from_now() until wait() would return. Throws before that, and without such a call.
  float getDuration() const override;
  void time_from_now();
  std::chrono::milliseconds getTimeout() const { return timeout_; }  // overrides one that torch 2.11 lacks
  uint64_t getCompletionKey() const { return key_; }                 // and this too

 private:
  const TensorWork work_;
  const std::vector<std::vector<at::Tensor>> results_;
  const std::uint64_t sequence_;
  const std::uint64_t key_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<std::atomic<float>> took_;  // milliseconds; negative: it goes on; null: not timed
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// A process group over a RawGroup. Threads: as for any Backend of c10d. Functions that form the group, and operations,
/// throw c10::DistBackendError.
class TorchProcessGroup final : public c10d::Backend {
 public:
  /// Returns the names of the ranks' agents, in the order of the ranks. May block, and throw.
  using Names = std::function<std::vector<std::string>()>;
  /// Forms the group, which blocks until all ranks have come. With `options->lazy` the first operation forms it.
  TorchProcessGroup(std::shared_ptr<Groups> groups, Names names, int rank, int size,
                    c10::intrusive_ptr<TorchGroupOptions> options);
  ~TorchProcessGroup() override = default;

  /// As the constructor. The ranks tell one another the names of their agents in `store`, when they form the group.
  static c10::intrusive_ptr<TorchProcessGroup> meet_at(c10::intrusive_ptr<c10d::Store> store,
                                                       std::shared_ptr<Groups> groups, int rank, int size,
                                                       c10::intrusive_ptr<TorchGroupOptions> options);

  const std::string getBackendName() const override { return "tensorferry"; }
  /// Makes the works of later operations tell their getDuration().
  void enableCollectivesTiming() override { is_timed_ = true; }
  /// Returns a copy: torch 2.11 writes the options of the parts of a group into it.
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_->copy(); }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }

  bool supportsSplitting() const override { return true; }
  /// Makes the process group of these ranks of this one; null if this rank is not among them. All ranks call it, and
  /// may pass different ranks. The label of this group is not inherited. Uses no store. Torch calls it once for each
  /// type of device, with the same name: the later calls return the same process group.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  /// Makes the process group of several groups' ranks, which meet in `store`, each with a rank that torch gives it: the
  /// ranks of one job, whose agents find one another. Blocks until all have come. Torch calls it for
  /// merge_remote_group(), which takes a store of its own each time.
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& options, const int& rank,
                                    const int& size) override;
#ifdef TENSORFERRY_COMPLETION_HOOKS
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override { hooks_->add(id, std::move(hook)); }
  void unregisterCompletionHook(int64_t id) override { hooks_->remove(id); }
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
  /// The hooks run when an operation ends after the group has failed: because a rank has died, or is late in an
  /// operation of all ranks, or a rank aborts. They run before any wait() for the operation returns, on the thread that
  /// ends it, and must not wait for it. abort() runs them first. They do not run if a send or receive fails alone, or
  /// if a rank leaves. shutdown() drops them.
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override { abort_hooks_->add(id, std::move(hook)); }
  void unregisterAbortHook(int64_t id) override { abort_hooks_->remove(id); }
#endif

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return true; }
  /// Returns the name of this rank's agent.
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  /// Forms the group anew, of the agents `opts.handles`: by position if they are a list, else ordered by their text.
  /// The operations of the group that there was fail with Cancelled. Blocks until all have come, and returns the work
  /// of their first barrier. The survivors of a group call it with fewer handles, and new processes with the same.
  ///
  /// `opts.uuid` is the same at all ranks, and new; hints are ignored. Throws a ValueError if it has been used, or if
  /// this rank is not among the handles; c10::DistBackendError if a member has died or has not come in time. The old
  /// group has failed then too, and the call may be made again with another uuid.
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif

#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return options_->regions != nullptr; }
  /// Makes a window, and registers `tensor` with it unless there is none: all ranks call it, as TorchWindow says.
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif

  using WorkPointer = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  // broadcast, allreduce and allgather take several tensors a rank too, as those of ProcessGroupGloo do, if all are on
  // the CPU and of one dtype and shape: several_tensors.cpp.
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPointer allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPointer allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& opts) override;
  WorkPointer gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPointer scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPointer reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& opts) override;
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& opts) override;
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPointer send(Tensors& tensors, int to, int tag) override;
  WorkPointer recv(Tensors& tensors, int from, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;
  WorkPointer barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  /// A group that has not been formed stays as it is.
  void abort() override;
  /// Leaves the group after the operations of all ranks that have been started here: destroy_process_group(). Sends and
  /// receives that have not ended fail. Throws what a signal handler raises meanwhile, and does not leave then.
  void shutdown() override;

  /// Returns the group. Forms it first if no operation has.
  const DeviceGroup& group();
  /// The same, for those who keep it.
  std::shared_ptr<DeviceGroup> shared_group() {
    group();
    return group_;
  }

 private:
  friend class TorchWindow;  // its operations are works of this group

  void form(const Names& names, const std::string& key, std::chrono::milliseconds timeout);
  [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(size_); }
  StartOptions start_options(std::chrono::milliseconds timeout, bool background) const;
  // These are DeviceGroup::on() and staged_on(), and form the group if no operation has.
  TensorGroup group_on(const char* operation, std::initializer_list<at::TensorList> tensors,
                       const StartOptions& options);
  TensorGroup staged_group_on(const char* operation, std::initializer_list<at::TensorList> tensors);
  WorkPointer work_of(const TensorGroup& on, TensorGroup::Started started, c10d::OpType type, const char* title,
                      TensorLists results, const Tensors& inputs, std::chrono::milliseconds timeout);
  /// Gives all tensors at all ranks the value of the root's tensor `opts.rootTensor`.
  WorkPointer broadcast_several(Tensors& tensors, std::size_t root, const c10d::BroadcastOptions& opts);
  /// Reduces all tensors of all ranks, and gives each tensor the result.
  WorkPointer allreduce_several(Tensors& tensors, ReduceOp op, const c10d::AllreduceOptions& opts);
  /// Gives each list the tensors of all ranks: those of rank 0, then those of rank 1.
  WorkPointer allgather_several(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts);

  const std::shared_ptr<Groups> groups_;
  const std::shared_ptr<const void> use_of_groups_ = groups_->use();
  const c10::intrusive_ptr<TorchGroupOptions> options_;
  std::mutex forming_;
  Names names_;                                      // guarded by forming_; empty once the group is formed
  std::shared_ptr<DeviceGroup> group_;               // guarded by forming_
  std::atomic<const DeviceGroup*> formed_{nullptr};  // group_, once it is set
  // The groups before reconfigure(), of which other threads may be inside. Guarded by forming_.
  std::vector<std::shared_ptr<DeviceGroup>> former_;
  const std::string first_key_ = options_->settings.key;
  std::set<std::int64_t> instances_;  // the uuids of reconfigure(); guarded by forming_
  std::atomic<std::uint64_t> sequence_{0}, works_{0}, merges_{0};
  std::atomic<bool> is_timed_{false};
  struct Splits {
    std::mutex mutex;  // guards the others
    std::uint64_t count = 0;
    std::string last;                                            // torch's name of the part
    std::optional<c10::weak_intrusive_ptr<c10d::Backend>> part;  // of the last; nullopt: this rank is not in it
  };
  Splits splits_;
#ifdef C10D_BACKEND_HAS_HOOKS
  const std::shared_ptr<AbortHooks> abort_hooks_ = std::make_shared<AbortHooks>();
#endif
#ifdef TENSORFERRY_COMPLETION_HOOKS
  const std::shared_ptr<CompletionHooks> hooks_ = std::make_shared<CompletionHooks>();
#endif
};

}  // namespace tensorferry::collectives
