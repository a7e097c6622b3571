// The operations of a group, as steps.
#include <utility>

#include "rpc/collectives/raw_group.h"
#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives {
namespace {

constexpr std::uint64_t uneven = ~std::uint64_t{0};
constexpr std::int32_t no_root = -1;

Fingerprint fingerprint_of(Operation operation, DType dtype, std::uint64_t bytes, std::int32_t root = no_root,
                           const ReduceOp& op = {}) {
  Fingerprint out;
  out.operation = static_cast<std::uint8_t>(operation);
  out.dtype = static_cast<std::uint8_t>(dtype);
  out.reduction = static_cast<std::uint8_t>(op.kind);
  out.root = root;
  out.elements = bytes == uneven ? uneven : bytes / size_of(dtype);
  out.factor = op.factor;
  return out;
}

std::size_t total(const auto& pieces) {
  std::size_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.size();
  return bytes;
}

}  // namespace

RawGroup::Work RawGroup::barrier(StartOptions options) {
  return start(std::move(options), [this](const WaitLimits& limits) {
    return exchange(fingerprint_of(Operation::barrier, DType::uint8, 0), ExchangeStep(size()), limits);
  });
}

RawGroup::Work RawGroup::broadcast(OutBytes data, DType dtype, std::size_t root, StartOptions options) {
  return start(std::move(options), [=, this](const WaitLimits& limits) {
    const auto called = fingerprint_of(Operation::broadcast, dtype, data.size(), static_cast<std::int32_t>(root));
    const auto algorithm = choose(Operation::broadcast, data.size(), true);
    if (algorithm == Algorithm::ring) return broadcast_by_ring(called, data, root, limits);
    if (algorithm == Algorithm::two_level) return broadcast_two_level(called, data, root, limits);
    ExchangeStep step(size());
    step.into.assign(size(), data.data());
    if (rank() == root) step.give.assign(size(), data);
    step.take[root] = data.size();
    return exchange(called, std::move(step), limits);
  });
}

Status RawGroup::reduce_by(Algorithm algorithm, const Fingerprint& called, InBytes input, OutBytes output,
                           const ReduceOp& op, std::size_t root, const WaitLimits& limits) {
  if (algorithm == Algorithm::ring) return reduce_by_ring(called, input, output, op, root, limits);
  if (algorithm == Algorithm::two_level) return reduce_two_level(called, input, output, op, root, limits);
  if (algorithm == Algorithm::one_shot) return reduce_one_shot(called, input, output, op, root, limits);
  return reduce_two_shot(called, input, output, op, root, limits);
}

RawGroup::Work RawGroup::all_reduce(InBytes input, OutBytes output, DType dtype, ReduceOp op, StartOptions options) {
  return start(std::move(options), [=, this, op = std::move(op)](const WaitLimits& limits) -> Status {
    const auto called = fingerprint_of(Operation::all_reduce, dtype, input.size(), no_root, op);
    return reduce_by(choose(Operation::all_reduce, input.size(), reduces_in_turn(op, dtype)), called, input, output, op,
                     Mailbox::any_rank, limits);
  });
}

RawGroup::Work RawGroup::reduce(InBytes input, OutBytes output, DType dtype, ReduceOp op, std::size_t root,
                                StartOptions options) {
  return start(std::move(options), [=, this, op = std::move(op)](const WaitLimits& limits) -> Status {
    const auto called = fingerprint_of(Operation::reduce, dtype, input.size(), static_cast<std::int32_t>(root), op);
    return reduce_by(choose(Operation::reduce, input.size(), reduces_in_turn(op, dtype)), called, input, output, op,
                     root, limits);
  });
}

RawGroup::Work RawGroup::all_gather(InBytes input, std::vector<OutBytes> outputs, DType dtype, bool even,
                                    StartOptions options) {
  return start(std::move(options), [=, this](const WaitLimits& limits) {
    const auto called = fingerprint_of(Operation::all_gather, dtype, even ? input.size() : uneven);
    if (even && choose(Operation::all_gather, total(outputs), true) == Algorithm::ring) {
      return all_gather_by_ring(called, input, outputs, limits);
    }
    ExchangeStep step(size());
    step.give.assign(size(), input);
    for (std::size_t from = 0; from < size(); ++from) {
      step.take[from] = outputs[from].size();
      step.into.push_back(outputs[from].data());
    }
    return exchange(called, std::move(step), limits);
  });
}

RawGroup::Work RawGroup::gather(InBytes input, std::vector<OutBytes> outputs, DType dtype, std::size_t root,
                                StartOptions options) {
  return start(std::move(options), [=, this](const WaitLimits& limits) {
    ExchangeStep step(size());
    step.give[root] = input;
    step.into.assign(size(), nullptr);
    for (std::size_t from = 0; rank() == root && from < size(); ++from) {
      step.take[from] = outputs[from].size();
      step.into[from] = outputs[from].data();
    }
    return exchange(fingerprint_of(Operation::gather, dtype, input.size(), static_cast<std::int32_t>(root)),
                    std::move(step), limits);
  });
}

RawGroup::Work RawGroup::scatter(std::vector<InBytes> inputs, OutBytes output, DType dtype, std::size_t root,
                                 StartOptions options) {
  return start(std::move(options), [=, this](const WaitLimits& limits) {
    ExchangeStep step(size());
    if (rank() == root) step.give = inputs;
    step.into.assign(size(), output.data());
    step.take[root] = output.size();
    return exchange(fingerprint_of(Operation::scatter, dtype, output.size(), static_cast<std::int32_t>(root)),
                    std::move(step), limits);
  });
}

RawGroup::Work RawGroup::reduce_scatter(std::vector<InBytes> inputs, OutBytes output, DType dtype, ReduceOp op,
                                        StartOptions options) {
  return start(std::move(options), [=, this, op = std::move(op)](const WaitLimits& limits) {
    const auto called = fingerprint_of(Operation::reduce_scatter, dtype, total(inputs), no_root, op);
    if (choose(Operation::reduce_scatter, total(inputs), reduces_in_turn(op, dtype)) == Algorithm::ring) {
      return reduce_scatter_by_ring(called, inputs, output, op, limits);
    }
    ExchangeStep step(size());
    step.give = inputs;
    step.take.assign(size(), output.size());
    step.reduction = &op;
    step.dtype = dtype;
    step.out = output.data();
    step.count = output.size() / size_of(dtype);
    return exchange(called, std::move(step), limits);
  });
}

RawGroup::Work RawGroup::all_to_all(std::vector<InBytes> inputs, std::vector<OutBytes> outputs, DType dtype, bool even,
                                    StartOptions options) {
  return start(std::move(options), [=, this](const WaitLimits& limits) {
    ExchangeStep step(size());
    step.give = inputs;
    for (std::size_t from = 0; from < size(); ++from) {
      step.take[from] = outputs[from].size();
      step.into.push_back(outputs[from].data());
    }
    return exchange(fingerprint_of(Operation::all_to_all, dtype, even ? total(inputs) : uneven), std::move(step),
                    limits);
  });
}

}  // namespace tensorferry::collectives
