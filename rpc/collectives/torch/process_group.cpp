#include "rpc/collectives/torch/process_group.h"

#include <c10/util/Exception.h>

#include <utility>

#include "rpc/tensor.h"

namespace tensorferry::collectives {
namespace {

using Started = TensorGroup::Started;

[[noreturn]] void throw_status(const Status& status) { C10_THROW_ERROR(DistBackendError, status.text()); }

const at::Tensor& only(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "the backend tensorferry takes one tensor a rank, not ", tensors.size());
  return tensors[0];
}

const std::vector<at::Tensor>& only_list(const std::vector<std::vector<at::Tensor>>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, "the backend tensorferry takes one list of tensors a rank, not ", lists.size());
  return lists[0];
}

/// Returns the one list, or an empty one at the ranks that need none.
std::vector<at::Tensor> list_at_root(const std::vector<std::vector<at::Tensor>>& lists, bool root) {
  if (root) return only_list(lists);
  TORCH_CHECK_VALUE(lists.empty() || (lists.size() == 1 && lists[0].empty()),
                    "only the root passes tensors for the other ranks");
  return {};
}

ReduceOp op_of(const c10d::ReduceOp& given) {
  switch (given.op_) {
    case c10d::ReduceOp::SUM:
      return Reduction::sum;
    case c10d::ReduceOp::AVG:
      return Reduction::average;
    case c10d::ReduceOp::PRODUCT:
      return Reduction::product;
    case c10d::ReduceOp::MIN:
      return Reduction::min;
    case c10d::ReduceOp::MAX:
      return Reduction::max;
    case c10d::ReduceOp::BAND:
      return Reduction::band;
    case c10d::ReduceOp::BOR:
      return Reduction::bor;
    case c10d::ReduceOp::BXOR:
      return Reduction::bxor;
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* const factor = static_cast<const c10d::NCCLPreMulSumSupplement*>(given.supplement_.get());
      TORCH_CHECK_VALUE(factor != nullptr, "a premultiplied sum needs a factor");
      ReduceOp op(Reduction::premultiplied_sum);
      op.factor = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>() : factor->double_factor;
      return op;
    }
    default:
      C10_THROW_ERROR(ValueError, "there is no such reduction");
  }
}

std::vector<at::Tensor> rows(const at::Tensor& tensor, std::size_t ranks, const std::vector<std::int64_t>& counts) {
  auto out = rows_of(tensor, ranks, counts);
  TORCH_CHECK_VALUE(out.ok(), std::string(out.status().what()));
  return *std::move(out);
}

/// Divides the elements of a tensor of any shape evenly among the ranks.
std::vector<at::Tensor> shares(const at::Tensor& tensor, std::size_t ranks) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "the tensor of all ranks must be contiguous");
  return rows(tensor.view({-1}), ranks, {});
}

c10::IValue value_of(const std::vector<std::vector<at::Tensor>>& results) {
  if (results.size() == 1) return results[0];
  return results;
}

}  // namespace

// ---- work

TorchWork::TorchWork(std::shared_ptr<GroupWork> work, c10d::OpType type, const char* title,
                     std::vector<std::vector<at::Tensor>> results, const std::vector<at::Tensor>& inputs,
                     std::uint64_t sequence, std::chrono::milliseconds timeout)
    : Work(-1, type, title, inputs),
      work_(std::move(work)),
      results_(std::move(results)),
      sequence_(sequence),
      timeout_(timeout) {
  if (recordFunctionEndCallback_) {
    work_->on_done([end = std::move(recordFunctionEndCallback_)](const Status&) { end(); });
  }
}

bool TorchWork::isCompleted() { return work_->done(); }
bool TorchWork::isSuccess() const { return work_->done() && work_->status().ok(); }

std::exception_ptr TorchWork::exception() const {
  if (work_->status().ok()) return nullptr;
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, work_->status().text()));
}

int TorchWork::sourceRank() const { return static_cast<int>(work_->letter().from); }

std::vector<at::Tensor> TorchWork::result() {
  std::vector<at::Tensor> out;
  for (const auto& list : results_) out.insert(out.end(), list.begin(), list.end());
  return out;
}

bool TorchWork::wait(std::chrono::milliseconds timeout) {
  const bool bounded = timeout != kNoTimeout;
  if (!work_->wait(bounded ? std::optional(std::chrono::steady_clock::now() + timeout) : std::nullopt)) {
    C10_THROW_ERROR(DistBackendError, c10::str("DeadlineExceeded: the operation did not end within ", timeout.count(),
                                               " ms; it goes on"));
  }
  if (!work_->status().ok()) throw_status(work_->status());
  return true;
}

void TorchWork::abort() {
  TORCH_CHECK(false, "an operation of the backend tensorferry cannot be aborted alone: abort the group");
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFuture() {
  const std::lock_guard lock(future_mutex_);
  if (future_) return future_;
  const auto type = results_.size() == 1 ? c10::ListType::create(c10::TensorType::get())
                                         : c10::ListType::create(c10::ListType::create(c10::TensorType::get()));
  future_ = c10::make_intrusive<c10::ivalue::Future>(type);
  work_->on_done([future = future_, results = results_](const Status& status) {
    if (status.ok()) return future->markCompleted(value_of(results));
    future->setError(std::make_exception_ptr(
        c10::DistBackendError({"getFuture", __FILE__, static_cast<std::uint32_t>(__LINE__)}, status.text())));
  });
  return future_;
}

// ---- the process group

TorchProcessGroup::TorchProcessGroup(std::shared_ptr<RawGroup> group, std::chrono::milliseconds timeout)
    : Backend(static_cast<int>(group->rank()), static_cast<int>(group->size())),
      group_(std::move(group)),
      tensors_(group_),
      options_(c10::make_intrusive<Options>("tensorferry", timeout)) {
  init();
}

StartOptions TorchProcessGroup::start_options(std::chrono::milliseconds timeout, bool background) const {
  StartOptions out;
  out.timeout = timeout == c10d::kUnsetTimeout || timeout.count() <= 0 ? options_->timeout : timeout;
  out.background = background;
  return out;
}

TorchProcessGroup::WorkPointer TorchProcessGroup::work_of(Started started, c10d::OpType type, const char* title,
                                                          TensorLists results, const Tensors& inputs,
                                                          std::chrono::milliseconds timeout) {
  if (!started.ok()) throw_status(started.status());
  if (!c10d::isP2POp(type)) ++sequence_;
  return c10::make_intrusive<TorchWork>(*std::move(started), type, title, std::move(results), inputs, sequence_,
                                        start_options(timeout, true).timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return work_of(tensors_.broadcast(only(tensors), static_cast<std::size_t>(opts.rootRank),
                                    start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::BROADCAST, "tensorferry:broadcast", {tensors}, tensors, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (only(tensors).is_sparse()) return allreduce_sparse(tensors, opts);
  return work_of(tensors_.all_reduce(only(tensors), only(tensors), op_of(opts.reduceOp),
                                     start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::ALLREDUCE, "tensorferry:all_reduce", {tensors}, tensors, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allreduce_sparse(Tensors& tensors,
                                                                   const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(opts.reduceOp.op_ == c10d::ReduceOp::SUM, "sparse tensors can only be summed");
  auto tensor = only(tensors);
  if (const auto status = tensors_.all_reduce_sparse(tensor, start_options(opts.timeout, false)); !status.ok()) {
    throw_status(status);
  }
  // It has ended; a barrier's work stands for it.
  return work_of(Started(group_->barrier(start_options(opts.timeout, opts.asyncOp))), c10d::OpType::_ALLREDUCE_SPARSE,
                 "tensorferry:all_reduce_sparse", {tensors}, {}, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allreduce_coalesced(Tensors& tensors,
                                                                      const c10d::AllreduceCoalescedOptions& opts) {
  return work_of(
      tensors_.all_reduce_coalesced(tensors, op_of(opts.reduceOp), start_options(opts.timeout, opts.asyncOp)),
      c10d::OpType::ALLREDUCE_COALESCED, "tensorferry:all_reduce_coalesced", {tensors}, tensors, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return work_of(tensors_.reduce(only(tensors), only(tensors), op_of(opts.reduceOp),
                                 static_cast<std::size_t>(opts.rootRank), start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::REDUCE, "tensorferry:reduce", {tensors}, tensors, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allgather(TensorLists& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& opts) {
  return work_of(tensors_.all_gather(only(inputs), only_list(outputs), start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::ALLGATHER, "tensorferry:all_gather", outputs, inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                  const c10d::AllgatherOptions& opts) {
  return work_of(tensors_.all_gather(input, shares(output, group_->size()), start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::_ALLGATHER_BASE, "tensorferry:all_gather_into_tensor", {{output}}, {input},
                 opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                                      const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty(), "there is no tensor to gather");
  TORCH_CHECK_VALUE(outputs.size() == group_->size(), "there are ", outputs.size(), " lists for ", group_->size(),
                    " ranks");
  Started last(Status(Code::internal, ""));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors each;
    for (auto& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), "a list has another number of tensors than the input");
      each.push_back(list[i]);
    }
    last = tensors_.all_gather(inputs[i], each, start_options(opts.timeout, opts.asyncOp));
    if (!last.ok()) throw_status(last.status());
  }
  // Operations end in their order, so the last stands for all.
  return work_of(std::move(last), c10d::OpType::ALLGATHER_COALESCED, "tensorferry:all_gather_coalesced", outputs,
                 inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                                  const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(), "the inputs and outputs differ in number");
  Started last(Status(Code::internal, ""));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    last =
        tensors_.all_gather(inputs[i], shares(outputs[i], group_->size()), start_options(opts.timeout, opts.asyncOp));
    if (!last.ok()) throw_status(last.status());
  }
  return work_of(std::move(last), c10d::OpType::COALESCED, "tensorferry:all_gather_into_tensor_coalesced", {outputs},
                 inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::gather(TensorLists& outputs, Tensors& inputs,
                                                         const c10d::GatherOptions& opts) {
  const auto list = list_at_root(outputs, getRank() == opts.rootRank);
  return work_of(tensors_.gather(only(inputs), list, static_cast<std::size_t>(opts.rootRank),
                                 start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::GATHER, "tensorferry:gather", {list}, inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::scatter(Tensors& outputs, TensorLists& inputs,
                                                          const c10d::ScatterOptions& opts) {
  const auto list = list_at_root(inputs, getRank() == opts.rootRank);
  return work_of(tensors_.scatter(list, only(outputs), static_cast<std::size_t>(opts.rootRank),
                                  start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::SCATTER, "tensorferry:scatter", {outputs}, list, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                                 const c10d::ReduceScatterOptions& opts) {
  const auto& list = only_list(inputs);
  return work_of(
      tensors_.reduce_scatter(list, only(outputs), op_of(opts.reduceOp), start_options(opts.timeout, opts.asyncOp)),
      c10d::OpType::REDUCE_SCATTER, "tensorferry:reduce_scatter", {outputs}, list, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                       const c10d::ReduceScatterOptions& opts) {
  const auto dense = input.contiguous();
  return work_of(tensors_.reduce_scatter(shares(dense, group_->size()), output, op_of(opts.reduceOp),
                                         start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::_REDUCE_SCATTER_BASE, "tensorferry:reduce_scatter_tensor", {{output}}, {input},
                 opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(), "the inputs and outputs differ in number");
  Started last(Status(Code::internal, ""));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    last = tensors_.reduce_scatter(shares(inputs[i].contiguous(), group_->size()), outputs[i], op_of(opts.reduceOp),
                                   start_options(opts.timeout, opts.asyncOp));
    if (!last.ok()) throw_status(last.status());
  }
  return work_of(std::move(last), c10d::OpType::COALESCED, "tensorferry:reduce_scatter_tensor_coalesced", {outputs},
                 inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                                std::vector<int64_t>& output_splits,
                                                                std::vector<int64_t>& input_splits,
                                                                const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(output.is_contiguous(), "the output must be contiguous");
  const bool even = output_splits.empty() && input_splits.empty();
  const auto outputs = rows(output, group_->size(), output_splits);
  const auto inputs = rows(input.contiguous(), group_->size(), input_splits);
  return work_of(tensors_.all_to_all(inputs, outputs, even, start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::ALLTOALL_BASE, "tensorferry:all_to_all_single", {{output}}, {input}, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::alltoall(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllToAllOptions& opts) {
  return work_of(tensors_.all_to_all(inputs, outputs, false, start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::ALLTOALL, "tensorferry:all_to_all", {outputs}, inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::send(Tensors& tensors, int to, int tag) {
  return work_of(tensors_.send(only(tensors), static_cast<std::size_t>(to), static_cast<std::uint32_t>(tag),
                               start_options(c10d::kUnsetTimeout, true)),
                 c10d::OpType::SEND, "tensorferry:send", {tensors}, tensors, c10d::kUnsetTimeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::recv(Tensors& tensors, int from, int tag) {
  return work_of(tensors_.receive(only(tensors), static_cast<std::size_t>(from), static_cast<std::uint32_t>(tag),
                                  start_options(c10d::kUnsetTimeout, true)),
                 c10d::OpType::RECV, "tensorferry:recv", {tensors}, tensors, c10d::kUnsetTimeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  return work_of(tensors_.receive(only(tensors), Mailbox::any_rank, static_cast<std::uint32_t>(tag),
                                  start_options(c10d::kUnsetTimeout, true)),
                 c10d::OpType::RECVANYSOURCE, "tensorferry:recv_any_source", {tensors}, tensors, c10d::kUnsetTimeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::barrier(const c10d::BarrierOptions& opts) {
  return work_of(Started(group_->barrier(start_options(opts.timeout, opts.asyncOp))), c10d::OpType::BARRIER,
                 "tensorferry:barrier", {{}}, {}, opts.timeout);
}

void TorchProcessGroup::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto status = group_->monitored_barrier(start_options(opts.timeout, false).timeout, wait_all_ranks);
  if (!status.ok()) throw_status(status);
}

void TorchProcessGroup::abort() { group_->abort("by ProcessGroup.abort()"); }
void TorchProcessGroup::shutdown() { group_->close(); }

}  // namespace tensorferry::collectives
