/// The backend "tensorferry" of torch.distributed, for tensors of the CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "rpc/collectives/torch/tensor_group.h"

namespace tensorferry::collectives {

/// An operation of the backend. Errors become c10d::DistBackendError, at the call or in the work.
class TorchWork final : public c10d::Work {
 public:
  TorchWork(std::shared_ptr<GroupWork> work, c10d::OpType type, const char* title,
            std::vector<std::vector<at::Tensor>> results, const std::vector<at::Tensor>& inputs, std::uint64_t sequence,
            std::chrono::milliseconds timeout);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// The rank that a receive from any rank has received from.
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  /// Waits without the GIL, which torch's bindings release. `timeout` 0: until the operation's own.
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  std::chrono::milliseconds getTimeout() const { return timeout_; }  // overrides one that torch 2.11 lacks

 private:
  const std::shared_ptr<GroupWork> work_;
  const std::vector<std::vector<at::Tensor>> results_;
  const std::uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// A process group over a RawGroup. Threads: as for any Backend of c10d.
class TorchProcessGroup final : public c10d::Backend {
 public:
  TorchProcessGroup(std::shared_ptr<RawGroup> group, std::chrono::milliseconds timeout);
  ~TorchProcessGroup() override = default;

  const std::string getBackendName() const override { return "tensorferry"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }

  using WorkPointer = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
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
  void abort() override;
  void shutdown() override;

  [[nodiscard]] RawGroup& raw() const noexcept { return *group_; }

 private:
  StartOptions start_options(std::chrono::milliseconds timeout, bool background) const;
  WorkPointer work_of(TensorGroup::Started started, c10d::OpType type, const char* title, TensorLists results,
                      const Tensors& inputs, std::chrono::milliseconds timeout);

  const std::shared_ptr<RawGroup> group_;
  const TensorGroup tensors_;
  const c10::intrusive_ptr<Options> options_;
  std::atomic<std::uint64_t> sequence_{0};
};

}  // namespace tensorferry::collectives
