#include "rpc/collectives/torch/process_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_set>
#include <utility>
#include <variant>

#include "base/text.h"
#include "rpc/collectives/torch/interruptions.h"
#include "rpc/collectives/torch/meeting.h"
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

/// Returns a rank that torch gives. A negative one is not Mailbox::any_rank; check_rank() refuses it.
std::size_t rank_from(std::int64_t given) {
  if (given < 0) throw_status({Code::invalid_argument, formatted("a process group has no rank {}", given)});
  return static_cast<std::size_t>(given);
}

std::uint64_t tag_from(int given) {
  TORCH_CHECK_VALUE(given >= 0, "a tag is at least 0, and this one is ", given);
  return static_cast<std::uint64_t>(given);
}

/// Returns the one list, or an empty one at the ranks that need none.
std::vector<at::Tensor> list_at_root(const std::vector<std::vector<at::Tensor>>& lists, bool root) {
  if (root) return only_list(lists);
  TORCH_CHECK_VALUE(lists.empty() || (lists.size() == 1 && lists[0].empty()),
                    "only the root passes tensors for the other ranks");
  return {};
}

std::string shape_of(const at::Tensor& tensor) {
  std::string out;
  for (const auto size : tensor.sizes()) out += (out.empty() ? "" : ", ") + std::to_string(size);
  return "(" + out + ")";
}

/// Refuses what this rank gives to itself if it is of another shape than the output for it, as Gloo does. With tensors
/// of GPUs the numbers of elements decide alone, as with NCCL.
void check_shape(const at::Tensor& given, const at::Tensor& taken) {
  if (!given.device().is_cpu() || given.numel() != taken.numel() || given.sizes() == taken.sizes()) return;
  throw_status({Code::invalid_argument,
                formatted("this rank gives a tensor of shape {} to itself, and its output for it has the shape {}",
                          shape_of(given), shape_of(taken))});
}

/// Returns the tensor of `rank` in a list for all ranks; `otherwise` if the list is too short, which is refused later.
const at::Tensor& own_of(const std::vector<at::Tensor>& list, int rank, const at::Tensor& otherwise) {
  const auto own = static_cast<std::size_t>(rank);
  return own < list.size() ? list[own] : otherwise;
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

/// Starts `count` operations, which are one call: `start(i, options)` starts each. Returns the last one, which ends
/// after the others, and fails if one of them has.
template <class Start>
Started start_each(std::size_t count, StartOptions options, const Start& start) {
  Started last(Status(Code::internal, "no operation"));
  for (std::size_t i = 0; i < count; ++i) {
    last = start(i, options);
    if (!last.ok()) break;
    options.earlier = *last;
  }
  return last;
}

}  // namespace

namespace {

/// Returns whether the group is formed by reconfigure() alone.
bool waits_for_reconfigure([[maybe_unused]] const TorchGroupOptions& options) {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  return options.enable_reconfigure;
#else
  return false;
#endif
}

}  // namespace

TorchProcessGroup::TorchProcessGroup(std::shared_ptr<Groups> groups, Names names, int rank, int size,
                                     c10::intrusive_ptr<TorchGroupOptions> options)
    : Backend(rank, size), groups_(std::move(groups)), options_(std::move(options)), names_(std::move(names)) {
  init();
  TORCH_CHECK_VALUE(0 <= rank && rank < size, "rank ", rank, " is not within a process group of ", size, " ranks");
  if (!options_->lazy && !waits_for_reconfigure(*options_)) group();
}

c10::intrusive_ptr<TorchProcessGroup> TorchProcessGroup::meet_at(c10::intrusive_ptr<c10d::Store> store,
                                                                 std::shared_ptr<Groups> groups, int rank, int size,
                                                                 c10::intrusive_ptr<TorchGroupOptions> options) {
  auto names = [store = std::move(store), groups, rank, size, options] {
    const Meeting meeting(*groups, rank, size, *options);
    meeting.check_members();
    // A store of its own: other threads may block this connection while an operation waits for the other ranks.
    const auto own = options->lazy ? store->clone() : store;
    return meeting.await_names(*own, meeting.tell(*own));
  };
  return c10::make_intrusive<TorchProcessGroup>(std::move(groups), std::move(names), rank, size, std::move(options));
}

const DeviceGroup& TorchProcessGroup::group() {
  if (const auto* formed = formed_.load(std::memory_order_acquire)) return *formed;
  const Returning to_the_caller;
  const std::lock_guard lock(forming_);
  if (!group_) {
    TORCH_CHECK_WITH(DistBackendError, !waits_for_reconfigure(*options_),
                     "the process group was made with enable_reconfigure=True: call reconfigure() first");
    form(names_, options_->settings.key, options_->timeout);
    names_ = nullptr;
  }
  return *group_;
}

void TorchProcessGroup::form(const Names& names, const std::string& key, std::chrono::milliseconds timeout) {
  auto settings = options_->settings;
  settings.key = key;
  settings.timeout = timeout;
  settings.members_are_unique = true;
  if (settings.label.empty()) settings.label = options_->group_name.empty() ? "default" : options_->group_name;
  auto formed = run_interruptibly([groups = groups_, names, settings] { return groups->form(names(), settings); });
  if (!formed.ok()) throw_status(formed.status());
  group_ = std::make_shared<DeviceGroup>(*formed);
  for (std::size_t rank = 0; rank < (*formed)->size(); ++rank) {
    groups_->keep_number(number_of(*options_, rank), (*formed)->names()[rank]);
  }
  formed_.store(group_.get(), std::memory_order_release);
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
c10d::ReconfigureHandle TorchProcessGroup::get_reconfigure_handle() const { return groups_->agent()->self().name; }

c10::intrusive_ptr<c10d::Work> TorchProcessGroup::reconfigure(const c10d::ReconfigureOptions& opts) {
  const Returning to_the_caller;
  std::vector<std::string> names;
  if (const auto* const given = std::get_if<std::vector<c10d::ReconfigureHandle>>(&opts.handles)) {
    names = *given;
  } else {
    const auto& unordered = std::get<std::unordered_set<c10d::ReconfigureHandle>>(opts.handles);
    names.assign(unordered.begin(), unordered.end());
    std::sort(names.begin(), names.end());
  }
  const auto here = std::find(names.begin(), names.end(), get_reconfigure_handle());
  TORCH_CHECK_VALUE(here != names.end(), "reconfigure(): the handle of this rank, ", get_reconfigure_handle(),
                    ", is not among the ", names.size(), " handles");
  {
    const std::lock_guard lock(forming_);
    TORCH_CHECK_VALUE(instances_.insert(opts.uuid).second, "reconfigure(): the uuid ", opts.uuid,
                      " has been used before");
    if (group_) {
      group_->raw().abort("the process group is reconfigured");
      former_ = {std::exchange(group_, nullptr)};
      formed_.store(nullptr, std::memory_order_release);
    }
    const auto key = formatted("{}, instance {}", first_key_, opts.uuid);
    form([names] { return names; }, key, opts.timeout.value_or(options_->timeout));
    names_ = nullptr;
    rank_ = static_cast<int>(here - names.begin());
    size_ = static_cast<int>(names.size());
    const std::lock_guard parts(splits_.mutex);
    options_->settings.key = key;  // new members have split no group yet
    splits_.count = 0;
    splits_.last.clear();
  }
  return barrier({});
}
#endif

c10::intrusive_ptr<c10d::Backend> TorchProcessGroup::split(const c10::intrusive_ptr<c10d::Store>&,
                                                           const std::vector<int>& ranks,
                                                           const c10::intrusive_ptr<Options>& options) {
  const auto& all = group().raw().names();  // a lazy group forms here, at all its ranks
  const std::lock_guard lock(splits_.mutex);
  if (options && !options->group_name.empty() && options->group_name == splits_.last) {
    return splits_.part ? splits_.part->lock() : nullptr;
  }
  const auto number = ++splits_.count;
  const auto* const given = dynamic_cast<const TorchGroupOptions*>(options.get());
  TORCH_CHECK_TYPE(given != nullptr,
                   "pg_options of the backend tensorferry is a tensorferry.c10d.Options, not options of ",
                   options ? options->backend : "nothing");
  const auto here = std::find(ranks.begin(), ranks.end(), getRank());
  if (here == ranks.end()) {
    splits_.last = given->group_name;
    splits_.part.reset();
    return nullptr;
  }
  auto chosen = given->copy();
  chosen->regions = options_->regions;
  if (chosen->settings.label == options_->settings.label) chosen->settings.label.clear();
  // Torch's name of the part depends on the number of a process's groups, which may differ between the ranks.
  chosen->settings.key = options_->settings.key + ", split " + std::to_string(number);
  std::vector<std::string> names;
  chosen->global_ranks_in_group.clear();
  for (const auto rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < getSize(), "the process group has no rank ", rank);
    names.push_back(all[static_cast<std::size_t>(rank)]);
    const auto& global = options_->global_ranks_in_group;
    chosen->global_ranks_in_group.push_back(global.empty() ? static_cast<std::uint64_t>(rank)
                                                           : global.at(static_cast<std::size_t>(rank)));
  }
  const auto size = static_cast<int>(names.size());
  c10::intrusive_ptr<Backend> part = c10::make_intrusive<TorchProcessGroup>(
      groups_, [names = std::move(names)] { return names; }, static_cast<int>(here - ranks.begin()), size,
      std::move(chosen));
  splits_.last = given->group_name;
  splits_.part.emplace(part);
  return part;
}

c10::intrusive_ptr<c10d::Backend> TorchProcessGroup::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                           const c10::intrusive_ptr<Options>& options, const int& rank,
                                                           const int& size) {
  const auto* const given = dynamic_cast<const TorchGroupOptions*>(options.get());
  TORCH_CHECK_TYPE(given != nullptr, "the options of a merged group are those of the backend tensorferry");
  auto chosen = given->copy();
  chosen->regions = options_->regions;
  if (chosen->settings.label == options_->settings.label) chosen->settings.label.clear();
  chosen->global_ranks_in_group.clear();
  // The groups that are merged may have several names, so rank 0 says how the new one is called among its agents.
  const std::string place = "tensorferry/merged";
  if (rank == 0) store->set(place, formatted("{}, merge {}", groups_->agent()->self().name, ++merges_));
  chosen->settings.key = run_interruptibly([own = store->clone(), place] { return own->get_to_str(place); });
  return meet_at(store, groups_, rank, size, std::move(chosen));
}

StartOptions TorchProcessGroup::start_options(std::chrono::milliseconds timeout, bool background) const {
  StartOptions out;
  out.timeout = timeout == c10d::kUnsetTimeout || timeout.count() <= 0 ? options_->timeout : timeout;
  out.background = background;
  return out;
}

TensorGroup TorchProcessGroup::group_on(const char* operation, std::initializer_list<at::TensorList> tensors,
                                        const StartOptions& options) {
  const Returning to_the_caller;
  auto out = group().on(operation, tensors, options);
  if (!out.ok()) throw_status(out.status());
  return *std::move(out);
}

TensorGroup TorchProcessGroup::staged_group_on(const char* operation, std::initializer_list<at::TensorList> tensors) {
  auto out = group().staged_on(operation, tensors);
  if (!out.ok()) throw_status(out.status());
  return *std::move(out);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::work_of(const TensorGroup& on, Started started, c10d::OpType type,
                                                          const char* title, TensorLists results, const Tensors& inputs,
                                                          std::chrono::milliseconds timeout) {
  if (!started.ok()) throw_status(started.status());
  if (!c10d::isP2POp(type)) ++sequence_;
  const auto key = ++works_;
#ifdef TENSORFERRY_COMPLETION_HOOKS
  CompletionHooks::watch(hooks_, **started, key);
#endif
#ifdef C10D_BACKEND_HAS_HOOKS
  AbortHooks::watch(abort_hooks_, on.raw(), **started);
#endif
  auto work = c10::make_intrusive<TorchWork>(*std::move(started), on.access(), type, title, std::move(results), inputs,
                                             sequence_, key, start_options(timeout, true).timeout);
  if (is_timed_) work->time_from_now();
  return work;
}

TorchProcessGroup::WorkPointer TorchProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  if (tensors.size() > 1) return broadcast_several(tensors, rank_from(opts.rootRank), opts);
  const auto on = group_on("broadcast", {tensors}, start_options(opts.timeout, opts.asyncOp));
  return work_of(on, on.broadcast(only(tensors), rank_from(opts.rootRank), start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::BROADCAST, "tensorferry:broadcast", {tensors}, tensors, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() > 1) return allreduce_several(tensors, op_of(opts.reduceOp), opts);
  if (only(tensors).is_sparse()) return allreduce_sparse(tensors, opts);
  const auto on = group_on("all_reduce", {tensors}, start_options(opts.timeout, opts.asyncOp));
  return work_of(
      on, on.all_reduce(only(tensors), only(tensors), op_of(opts.reduceOp), start_options(opts.timeout, opts.asyncOp)),
      c10d::OpType::ALLREDUCE, "tensorferry:all_reduce", {tensors}, tensors, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allreduce_sparse(Tensors& tensors,
                                                                   const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(opts.reduceOp.op_ == c10d::ReduceOp::SUM, "sparse tensors can only be summed");
  const auto on = staged_group_on("all_reduce_sparse", {tensors});
  return work_of(on, on.all_reduce_sparse(only(tensors), start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::_ALLREDUCE_SPARSE, "tensorferry:all_reduce_sparse", {tensors}, {}, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allreduce_coalesced(Tensors& tensors,
                                                                      const c10d::AllreduceCoalescedOptions& opts) {
  const auto on = group_on("all_reduce_coalesced", {tensors}, start_options(opts.timeout, opts.asyncOp));
  return work_of(on, on.all_reduce_coalesced(tensors, op_of(opts.reduceOp), start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::ALLREDUCE_COALESCED, "tensorferry:all_reduce_coalesced", {tensors}, tensors,
                 opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const auto on = group_on("reduce", {tensors}, start_options(opts.timeout, opts.asyncOp));
  return work_of(on,
                 on.reduce(only(tensors), only(tensors), op_of(opts.reduceOp), rank_from(opts.rootRank),
                           start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::REDUCE, "tensorferry:reduce", {tensors}, tensors, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allgather(TensorLists& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& opts) {
  if (inputs.size() > 1) return allgather_several(outputs, inputs, opts);
  check_shape(only(inputs), own_of(only_list(outputs), getRank(), only(inputs)));
  const auto on = group_on("all_gather", {inputs, only_list(outputs)}, start_options(opts.timeout, opts.asyncOp));
  return work_of(on, on.all_gather(only(inputs), only_list(outputs), start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::ALLGATHER, "tensorferry:all_gather", outputs, inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                  const c10d::AllgatherOptions& opts) {
  const auto on = group_on("all_gather_into_tensor", {output, input}, start_options(opts.timeout, opts.asyncOp));
  return work_of(on, on.all_gather(input, shares(output, ranks()), start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::_ALLGATHER_BASE, "tensorferry:all_gather_into_tensor", {{output}}, {input},
                 opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                                      const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty(), "there is no tensor to gather");
  TORCH_CHECK_VALUE(outputs.size() == ranks(), "there are ", outputs.size(), " lists for ", ranks(), " ranks");
  Tensors all_outputs;
  for (const auto& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), "a list has another number of tensors than the input");
    all_outputs.insert(all_outputs.end(), list.begin(), list.end());
  }
  const auto& own = outputs[static_cast<std::size_t>(getRank())];
  for (std::size_t i = 0; i < inputs.size(); ++i) check_shape(inputs[i], own[i]);
  const auto on = group_on("all_gather_coalesced", {inputs, all_outputs}, start_options(opts.timeout, opts.asyncOp));
  auto last = start_each(inputs.size(), start_options(opts.timeout, opts.asyncOp), [&](std::size_t i, auto options) {
    Tensors each;
    for (auto& list : outputs) each.push_back(list[i]);
    return on.all_gather(inputs[i], each, std::move(options));
  });
  return work_of(on, std::move(last), c10d::OpType::ALLGATHER_COALESCED, "tensorferry:all_gather_coalesced", outputs,
                 inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                                  const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(), "the inputs and outputs differ in number");
  const auto on =
      group_on("all_gather_into_tensor_coalesced", {inputs, outputs}, start_options(opts.timeout, opts.asyncOp));
  auto last = start_each(inputs.size(), start_options(opts.timeout, opts.asyncOp), [&](std::size_t i, auto options) {
    return on.all_gather(inputs[i], shares(outputs[i], ranks()), std::move(options));
  });
  return work_of(on, std::move(last), c10d::OpType::COALESCED, "tensorferry:all_gather_into_tensor_coalesced",
                 {outputs}, inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::gather(TensorLists& outputs, Tensors& inputs,
                                                         const c10d::GatherOptions& opts) {
  const auto list = list_at_root(outputs, getRank() == opts.rootRank);
  check_shape(only(inputs), own_of(list, getRank(), only(inputs)));
  const auto on = group_on("gather", {inputs, list}, start_options(opts.timeout, opts.asyncOp));
  return work_of(on, on.gather(only(inputs), list, rank_from(opts.rootRank), start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::GATHER, "tensorferry:gather", {list}, inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::scatter(Tensors& outputs, TensorLists& inputs,
                                                          const c10d::ScatterOptions& opts) {
  const auto list = list_at_root(inputs, getRank() == opts.rootRank);
  check_shape(own_of(list, getRank(), only(outputs)), only(outputs));
  const auto on = group_on("scatter", {outputs, list}, start_options(opts.timeout, opts.asyncOp));
  return work_of(on,
                 on.scatter(list, only(outputs), rank_from(opts.rootRank), start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::SCATTER, "tensorferry:scatter", {outputs}, list, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                                 const c10d::ReduceScatterOptions& opts) {
  const auto& list = only_list(inputs);
  check_shape(own_of(list, getRank(), only(outputs)), only(outputs));
  const auto on = group_on("reduce_scatter", {outputs, list}, start_options(opts.timeout, opts.asyncOp));
  return work_of(
      on, on.reduce_scatter(list, only(outputs), op_of(opts.reduceOp), start_options(opts.timeout, opts.asyncOp)),
      c10d::OpType::REDUCE_SCATTER, "tensorferry:reduce_scatter", {outputs}, list, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                       const c10d::ReduceScatterOptions& opts) {
  const auto dense = input.contiguous();
  const auto on = group_on("reduce_scatter_tensor", {output, dense}, start_options(opts.timeout, opts.asyncOp));
  return work_of(on,
                 on.reduce_scatter(shares(dense, ranks()), output, op_of(opts.reduceOp),
                                   start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::_REDUCE_SCATTER_BASE, "tensorferry:reduce_scatter_tensor", {{output}}, {input},
                 opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(), "the inputs and outputs differ in number");
  Tensors dense;
  for (const auto& input : inputs) dense.push_back(input.contiguous());
  const auto on =
      group_on("reduce_scatter_tensor_coalesced", {outputs, dense}, start_options(opts.timeout, opts.asyncOp));
  auto last = start_each(dense.size(), start_options(opts.timeout, opts.asyncOp), [&](std::size_t i, auto options) {
    return on.reduce_scatter(shares(dense[i], ranks()), outputs[i], op_of(opts.reduceOp), std::move(options));
  });
  return work_of(on, std::move(last), c10d::OpType::COALESCED, "tensorferry:reduce_scatter_tensor_coalesced", {outputs},
                 inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                                std::vector<int64_t>& output_splits,
                                                                std::vector<int64_t>& input_splits,
                                                                const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(output.is_contiguous(), "the output must be contiguous");
  const bool even = output_splits.empty() && input_splits.empty();
  const auto outputs = rows(output, ranks(), output_splits);
  const auto dense = input.contiguous();
  const auto inputs = rows(dense, ranks(), input_splits);
  const auto on = group_on("all_to_all_single", {output, dense}, start_options(opts.timeout, opts.asyncOp));
  return work_of(on, on.all_to_all(inputs, outputs, even, start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::ALLTOALL_BASE, "tensorferry:all_to_all_single", {{output}}, {input}, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::alltoall(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllToAllOptions& opts) {
  const auto on = group_on("all_to_all", {outputs, inputs}, start_options(opts.timeout, opts.asyncOp));
  return work_of(on, on.all_to_all(inputs, outputs, false, start_options(opts.timeout, opts.asyncOp)),
                 c10d::OpType::ALLTOALL, "tensorferry:all_to_all", {outputs}, inputs, opts.timeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::send(Tensors& tensors, int to, int tag) {
  const auto on = staged_group_on("send", {tensors});
  return work_of(on, on.send(only(tensors), rank_from(to), tag_from(tag), start_options(c10d::kUnsetTimeout, true)),
                 c10d::OpType::SEND, "tensorferry:send", {tensors}, tensors, c10d::kUnsetTimeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::recv(Tensors& tensors, int from, int tag) {
  const auto on = staged_group_on("recv", {tensors});
  return work_of(on,
                 on.receive(only(tensors), rank_from(from), tag_from(tag), start_options(c10d::kUnsetTimeout, true)),
                 c10d::OpType::RECV, "tensorferry:recv", {tensors}, tensors, c10d::kUnsetTimeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  const auto on = staged_group_on("recvAnySource", {tensors});
  return work_of(on,
                 on.receive(only(tensors), Mailbox::any_rank, tag_from(tag), start_options(c10d::kUnsetTimeout, true)),
                 c10d::OpType::RECVANYSOURCE, "tensorferry:recvAnySource", {tensors}, tensors, c10d::kUnsetTimeout);
}

TorchProcessGroup::WorkPointer TorchProcessGroup::barrier(const c10d::BarrierOptions& opts) {
  return work_of(group().on_host(), Started(group().raw().barrier(start_options(opts.timeout, opts.asyncOp))),
                 c10d::OpType::BARRIER, "tensorferry:barrier", {{}}, {}, opts.timeout);
}

void TorchProcessGroup::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const Returning to_the_caller;
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout;
  const auto status = run_interruptibly([group = shared_group(), timeout, wait_all_ranks] {
    return group->raw().monitored_barrier(timeout, wait_all_ranks);
  });
  if (!status.ok()) throw_status(status);
}

void TorchProcessGroup::abort() {
  const auto* const formed = formed_.load(std::memory_order_acquire);
  if (formed == nullptr) return;
#ifdef C10D_BACKEND_HAS_HOOKS
  abort_hooks_->run();
#endif
  formed->raw().abort("by ProcessGroup.abort()");
}

void TorchProcessGroup::shutdown() {
#ifdef C10D_BACKEND_HAS_HOOKS
  const std::shared_ptr<void> at_the_end(nullptr, [this](void*) { abort_hooks_->clear(); });
#endif
  const auto* const formed = formed_.load(std::memory_order_acquire);
  if (formed == nullptr) return;
  const Returning to_the_caller;
  WaitInterruption interruption;
  formed->raw().end_started(interruption.check());
  interruption.rethrow();
  formed->drain(interruption.check());  // else the others could take this rank's last operations for unfinished ones
  interruption.rethrow();
  formed->raw().close();
}

}  // namespace tensorferry::collectives
