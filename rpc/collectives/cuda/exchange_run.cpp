// The operations that give and take pieces: broadcast, gather, scatter, reduce_scatter and all_to_all.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/text.h"
#include "rpc/collectives/cuda/stream_run.h"

namespace tensorferry::collectives::cuda {

/// Enqueues the kernel for each chunk of the pieces, once the ranks have agreed. It counts elements of `item` bytes.
Status StreamRun::enqueue_pieces(const Fingerprint& called, const FlagKernel& kernel, std::size_t item,
                                 const Pieces& pieces, const WaitLimits& limits) {
  const auto slot =
      pieces.one_for_all ? SymmetricBuffers::flag_half_bytes : slot_bytes(SymmetricBuffers::flag_half_bytes, ranks_);
  // A thread may write an output over the very input that it has read, but not over one that another thread reads.
  bool over = overlap(pieces.given, pieces.taken);
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    const InBytes given = pieces.given[rank], taken = pieces.taken[rank];
    over = over || (given.data() == taken.data() && given.size() != taken.size() && !given.empty() && !taken.empty());
  }
  if (over && pieces.most > slot) return overlapping(called, slot);
  now_.by_flags = true;
  return enqueue(called, limits, [&] {
    if (!captured_) direct_->watch().meets_by_flags();
    auto arguments = flag_arguments();
    arguments.slot_bytes = pieces.one_for_all ? 0 : slot;
    arguments.lent_stride = pieces.one_for_all ? 0 : pieces.most;
    for (std::size_t at = 0; at < pieces.most && result_ == CUDA_SUCCESS; at += slot) {
      lend(arguments, at);
      for (std::size_t rank = 0; rank < ranks_; ++rank) {
        const auto given = part_of(pieces.given[rank], at, slot);
        const auto taken = part_of(pieces.taken[rank], at, slot);
        arguments.inputs[rank] = given.empty() ? nullptr : given.data();
        arguments.outputs[rank] = taken.empty() ? nullptr : taken.data();
        arguments.given[rank] = given.size() / item;
        arguments.taken[rank] = taken.size() / item;
      }
      arguments.count = ranks_ * std::min(slot, pieces.most - at) / item;
      for (const bool gives : {true, false}) {
        if (!over && !gives) continue;
        arguments.gives = gives;
        arguments.takes = !over || !gives;
        if (arguments.takes && at + slot >= pieces.most) end_by_kernel(arguments);
        then(kernel.launch(arguments, stream_));
      }
    }
  });
}

/// Returns the kernel of an exchange of so many bytes; nullopt if the ranks do not meet by flags in it. Called before
/// the ranks agree, as in reduce().
std::optional<Result<FlagKernel>> StreamRun::find_exchange(const Fingerprint& called, std::size_t bytes) const {
  if (!meets_by_flags(called, bytes)) return std::nullopt;
  return FlagKernel::find_exchange(gpu_->device, item_of_exchange(static_cast<DType>(called.dtype)), ranks_);
}

/// Each rank takes the pieces that are for it. The ranks have agreed.
Status StreamRun::exchange_by_flags(const Fingerprint& called, const Result<FlagKernel>& kernel, const Pieces& pieces,
                                    const WaitLimits& limits) {
  if (!kernel.ok()) return kernel.status();
  return enqueue_pieces(called, *kernel, item_of_exchange(static_cast<DType>(called.dtype)), pieces, limits);
}

Status StreamRun::broadcast(const Fingerprint& called, OutBytes data, std::size_t root, const WaitLimits& limits) {
  begin();
  count(called, AlgorithmOnGpu::copies);
  const auto kernel = find_exchange(called, data.size());
  const InBytes given = rank_ == root ? data : OutBytes();
  if (auto status = agree(called, kernel.has_value(), given, data.size(), limits); !status.ok()) return status;
  if (kernel) {
    Pieces pieces(ranks_);
    pieces.one_for_all = true;
    pieces.most = data.size();
    pieces.given[rank_] = given;
    if (rank_ != root) pieces.taken[root] = data;
    return exchange_by_flags(called, *kernel, pieces, limits);
  }
  return enqueue(called, limits, [&] {
    for (std::size_t at = 0; ranks_ > 1 && at < data.size(); at += half_bytes) {
      const auto chunk = part_of(data, at, half_bytes);
      take_half();
      if (rank_ == root && !lends(root)) copy(half_of(rank_), chunk);
      meet();
      if (rank_ != root) copy(chunk.data(), {source_of(root, at), chunk.size()});
    }
    give_back_lent();
  });
}

Result<std::vector<std::uint64_t>> StreamRun::tell_sizes(const Fingerprint& called, std::vector<std::uint64_t> own,
                                                         const WaitLimits& limits) {
  std::vector<std::uint64_t> all(ranks_ * own.size());
  if (ranks_ == 1) return own;
  auto status = direct_->group().tell_each_other(called, std::as_bytes(std::span(own)),
                                                 std::as_writable_bytes(std::span(all)), limits);
  if (!status.ok()) return status;
  return all;
}

Status StreamRun::unexpected(std::size_t from, std::size_t to, std::uint64_t gives, std::uint64_t expected) const {
  const auto& group = direct_->group();
  return {Code::invalid_argument,
          formatted("{} gives {} bytes to {}, which expects {}", group.named(from), gives, group.named(to), expected)};
}

Status StreamRun::agree_on_pieces(const Fingerprint& called, const std::vector<InBytes>& inputs,
                                  const WaitLimits& limits) {
  std::vector<std::uint64_t> own;
  for (const auto& each : inputs) own.push_back(each.size());
  const auto sizes = tell_sizes(called, std::move(own), limits);
  if (!sizes.ok()) return sizes.status();
  for (std::size_t from = 0; from < ranks_; ++from) {
    for (std::size_t to = 0; to < ranks_; ++to) {
      const auto gives = (*sizes)[from * ranks_ + to], expected = (*sizes)[to * ranks_ + to];
      if (gives != expected) return unexpected(from, to, gives, expected);
    }
  }
  return {};
}

Status StreamRun::gather(const Fingerprint& called, InBytes input, const std::vector<OutBytes>& outputs,
                         std::size_t root, bool even, const WaitLimits& limits) {
  begin();
  count(called, AlgorithmOnGpu::copies);
  const bool takes = root == Mailbox::any_rank || root == rank_;
  std::size_t most = input.size();
  // The calls tell the size of a rank's own piece alone. So the root refuses other sizes before it agrees to the call,
  // and the group fails before anything is enqueued.
  for (std::size_t from = 0; even && takes && from < ranks_; ++from) {
    if (outputs[from].size() != most) return unexpected(from, rank_, most, outputs[from].size());
  }
  const auto kernel = find_exchange(called, even ? ranks_ * most : 0);
  Pieces pieces(ranks_);
  pieces.one_for_all = true;
  pieces.given[rank_] = input;
  if (takes) pieces.taken = outputs;
  if (even) {
    const auto own = pieces.lendable(rank_);
    if (auto status = agree(called, kernel.has_value(), own, most, limits); !status.ok()) return status;
  } else {
    const auto sizes = tell_sizes(called, {input.size()}, limits);
    if (!sizes.ok()) return sizes.status();
    most = *std::max_element(sizes->begin(), sizes->end());
    for (std::size_t from = 0; takes && from < ranks_; ++from) {
      if (outputs[from].size() != (*sizes)[from]) return unexpected(from, rank_, (*sizes)[from], outputs[from].size());
    }
  }
  pieces.most = most;
  if (kernel && (even || meets_by_flags(called, ranks_ * most)))
    return exchange_by_flags(called, *kernel, pieces, limits);
  return enqueue(called, limits, [&] {
    for (std::size_t at = 0; ranks_ > 1 && at < most; at += half_bytes) {
      take_half();
      if (!lends(rank_)) copy(half_of(rank_), part_of(input, at, half_bytes));
      meet();
      for (std::size_t i = 1; takes && i < ranks_; ++i) {
        const auto from = (rank_ + i) % ranks_;
        const auto chunk = part_of(outputs[from], at, half_bytes);
        copy(chunk.data(), {source_of(from, at), chunk.size()});
      }
    }
    give_back_lent();
    if (takes) copy(outputs[rank_].data(), input);
  });
}

Status StreamRun::scatter(const Fingerprint& called, const std::vector<InBytes>& inputs, OutBytes output,
                          std::size_t root, const WaitLimits& limits) {
  begin();
  count(called, AlgorithmOnGpu::copies);
  for (std::size_t to = 0; rank_ == root && to < ranks_; ++to) {  // as in gather()
    if (inputs[to].size() != output.size()) return unexpected(rank_, to, inputs[to].size(), output.size());
  }
  const auto kernel = find_exchange(called, ranks_ * output.size());
  if (auto status = agree(called, kernel.has_value(), {}, output.size(), limits); !status.ok()) return status;
  if (kernel) {
    Pieces pieces(ranks_);
    pieces.most = output.size();
    if (rank_ == root) pieces.given = inputs;
    pieces.taken[root] = output;
    return exchange_by_flags(called, *kernel, pieces, limits);
  }
  const auto slot = slot_bytes(half_bytes, ranks_);
  return enqueue(called, limits, [&] {
    for (std::size_t at = 0; ranks_ > 1 && at < output.size(); at += slot) {
      take_half();
      for (std::size_t to = 0; rank_ == root && to < ranks_; ++to) {
        if (to != rank_) copy(half_of(rank_) + to * slot, part_of(inputs[to], at, slot));
      }
      meet();
      const auto chunk = part_of(output, at, slot);
      if (rank_ != root) copy(chunk.data(), {half_of(root) + rank_ * slot, chunk.size()});
    }
    if (rank_ == root) copy(output.data(), inputs[rank_]);
  });
}

Status StreamRun::reduce_scatter(const Fingerprint& called, const std::vector<InBytes>& inputs, OutBytes output,
                                 const ReduceOp& op, bool even, const WaitLimits& limits) {
  begin();
  count(called, AlgorithmOnGpu::one_shot);
  const auto dtype = static_cast<DType>(called.dtype);
  const auto most = largest(inputs);
  const bool by_flags = meets_by_flags(called, ranks_ * most);
  Pieces pieces(ranks_);
  pieces.most = most;
  pieces.given = inputs;
  pieces.taken[rank_] = output;
  std::optional<Result<FlagKernel>> flag_kernel;
  std::optional<Result<ReductionKernel>> kernel;
  if (by_flags) {
    flag_kernel = FlagKernel::find(gpu_->device, dtype, op, ranks_, FlagKernel::Kind::reduce_pieces);
  } else {
    kernel = ReductionKernel::find(gpu_->device, dtype, op, ranks_);
  }
  if (!even) {
    if (auto status = agree_on_pieces(called, inputs, limits); !status.ok()) return status;
  } else if (by_flags) {
    // If pieces are not aligned, the threads of a kernel share out the elements in another way to reduce them than
    // to copy them. So a thread would read what a thread of another block of a rank that does not lend copies.
    const auto own = most % alignment == 0 ? pieces.lendable(rank_) : InBytes();
    if (auto status = agree(called, by_flags, own, ranks_ * most, limits); !status.ok()) return status;
  } else {
    if (auto status = direct_->group().agree_on(called, limits); !status.ok()) return status;
  }
  if (by_flags) {
    if (!flag_kernel->ok()) return flag_kernel->status();
    return enqueue_pieces(called, **flag_kernel, size_of(dtype), pieces, limits);
  }
  if (!kernel->ok()) return kernel->status();
  const auto item = size_of(dtype);
  const auto slot = slot_bytes(half_bytes, ranks_);
  return enqueue(called, limits, [&] {
    if (ranks_ == 1) return one_shot(**kernel, item, inputs[0], output);
    for (std::size_t at = 0; at < most; at += slot) {
      take_half();
      for (std::size_t to = 0; to < ranks_; ++to) {
        const auto chunk = part_of(inputs[to], at, slot);
        if (to != rank_ || !is_aligned(chunk.data())) copy(half_of(rank_) + to * slot, chunk);
      }
      meet();
      const auto own = part_of(inputs[rank_], at, slot);
      const auto out = part_of(output, at, slot);
      reduce_halves(**kernel, rank_ * slot, out.size(), item, own.data(), out.data(), nullptr);
    }
  });
}

Status StreamRun::all_to_all(const Fingerprint& called, const std::vector<InBytes>& inputs,
                             const std::vector<OutBytes>& outputs, bool even, const WaitLimits& limits) {
  begin();
  count(called, AlgorithmOnGpu::copies);
  auto most = largest(inputs);
  const auto kernel = find_exchange(called, even ? ranks_ * most : 0);
  Pieces pieces(ranks_);
  pieces.most = most;
  pieces.given = inputs;
  pieces.taken = outputs;
  if (even && kernel) {
    const auto own = pieces.lendable(rank_);
    if (auto status = agree(called, kernel.has_value(), own, ranks_ * most, limits); !status.ok()) return status;
  } else if (even) {
    if (auto status = direct_->group().agree_on(called, limits); !status.ok()) return status;
  } else {
    std::vector<std::uint64_t> own;
    for (const auto& each : inputs) own.push_back(each.size());
    const auto sizes = tell_sizes(called, std::move(own), limits);
    if (!sizes.ok()) return sizes.status();
    most = *std::max_element(sizes->begin(), sizes->end());
    for (std::size_t from = 0; from < ranks_; ++from) {
      const auto gives = (*sizes)[from * ranks_ + rank_];
      if (outputs[from].size() != gives) return unexpected(from, rank_, gives, outputs[from].size());
    }
  }
  pieces.most = most;
  if (kernel && (even || meets_by_flags(called, ranks_ * most)))
    return exchange_by_flags(called, *kernel, pieces, limits);
  const auto slot = slot_bytes(half_bytes, ranks_);
  // An output that lies over another rank's input is written only after all inputs have been read.
  const bool over = overlap(inputs, outputs);
  if (over && most > slot) return overlapping(called, slot);
  return enqueue(called, limits, [&] {
    for (std::size_t at = 0; ranks_ > 1 && at < most; at += slot) {
      take_half();
      for (std::size_t to = 0; to < ranks_; ++to) {
        if (to != rank_ || over) copy(half_of(rank_) + to * slot, part_of(inputs[to], at, slot));
      }
      meet();
      for (std::size_t i = 1; i < ranks_; ++i) {
        const auto from = (rank_ + i) % ranks_;
        const auto chunk = part_of(outputs[from], at, slot);
        copy(chunk.data(), {half_of(from) + rank_ * slot, chunk.size()});
      }
    }
    const bool from_half = over && ranks_ > 1;
    copy(outputs[rank_].data(),
         from_half ? InBytes(half_of(rank_) + rank_ * slot, inputs[rank_].size()) : inputs[rank_]);
  });
}

}  // namespace tensorferry::collectives::cuda
