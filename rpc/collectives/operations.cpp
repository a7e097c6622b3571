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

/// Returns the elements that `rank` reduces for all: [first, second).
std::pair<std::size_t, std::size_t> share_of(std::size_t rank, std::size_t ranks, std::size_t elements) {
  return {elements * rank / ranks, elements * (rank + 1) / ranks};
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
    ExchangeStep step(size());
    step.into.assign(size(), data.data());
    if (rank() == root) step.give.assign(size(), data);
    if (rank() == root) step.take[root] = data.size();
    if (rank() != root) step.take[root] = data.size();
    return exchange(fingerprint_of(Operation::broadcast, dtype, data.size(), static_cast<std::int32_t>(root)),
                    std::move(step), limits);
  });
}

Status RawGroup::reduce_one_shot(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op,
                                 std::size_t root, const WaitLimits& limits) {
  const bool takes = root == Mailbox::any_rank || root == rank();
  ExchangeStep step(size());
  for (std::size_t to = 0; to < size(); ++to) {
    if (to == rank() || root == Mailbox::any_rank || root == to) step.give[to] = input;
    if (takes || to == rank()) step.take[to] = input.size();
  }
  step.dtype = static_cast<DType>(called.dtype);
  if (takes) {
    step.reduction = &op;
    step.out = output.data();
    step.count = called.elements;
  } else {
    step.into.assign(size(), const_cast<std::byte*>(input.data()));  // its own bytes stay where they are
  }
  return exchange(called, std::move(step), limits);
}

Status RawGroup::reduce_two_shot(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op,
                                 std::size_t root, const WaitLimits& limits) {
  const auto item = size_of(static_cast<DType>(called.dtype));
  const auto range = [&](std::size_t of) {
    const auto [begin, end] = share_of(of, size(), called.elements);
    return std::pair(begin * item, (end - begin) * item);
  };
  const bool everywhere = root == Mailbox::any_rank;
  const auto [begin, bytes] = range(rank());
  std::vector<std::byte> temporary(everywhere || rank() == root ? 0 : bytes);
  auto* const share = temporary.empty() ? output.data() + begin : temporary.data();

  ExchangeStep scattered(size());
  for (std::size_t other = 0; other < size(); ++other) {
    scattered.give[other] = input.subspan(range(other).first, range(other).second);
    scattered.take[other] = bytes;
  }
  scattered.dtype = static_cast<DType>(called.dtype);
  scattered.reduction = &op;
  scattered.out = share;
  scattered.count = bytes / item;
  if (auto status = exchange(called, std::move(scattered), limits); !status.ok()) return status;

  ExchangeStep gathered(size());
  gathered.into.assign(size(), nullptr);
  for (std::size_t other = 0; other < size(); ++other) {
    if (everywhere || other == root || other == rank()) gathered.give[other] = {share, bytes};
    if (everywhere || rank() == root) {
      gathered.take[other] = range(other).second;
      gathered.into[other] = output.data() + range(other).first;
    }
  }
  gathered.take[rank()] = bytes;
  if (gathered.into[rank()] == nullptr) gathered.into[rank()] = share;
  return exchange(called, std::move(gathered), limits);
}

RawGroup::Work RawGroup::all_reduce(InBytes input, OutBytes output, DType dtype, ReduceOp op, StartOptions options) {
  return start(std::move(options), [=, this, op = std::move(op)](const WaitLimits& limits) -> Status {
    const auto called = fingerprint_of(Operation::all_reduce, dtype, input.size(), no_root, op);
    const auto chosen = choose(Operation::all_reduce, input.size(), size(), links_, settings_.algorithms);
    return chosen == Algorithm::one_shot ? reduce_one_shot(called, input, output, op, Mailbox::any_rank, limits)
                                         : reduce_two_shot(called, input, output, op, Mailbox::any_rank, limits);
  });
}

RawGroup::Work RawGroup::reduce(InBytes input, OutBytes output, DType dtype, ReduceOp op, std::size_t root,
                                StartOptions options) {
  return start(std::move(options), [=, this, op = std::move(op)](const WaitLimits& limits) -> Status {
    const auto called = fingerprint_of(Operation::reduce, dtype, input.size(), static_cast<std::int32_t>(root), op);
    const auto chosen = choose(Operation::reduce, input.size(), size(), links_, settings_.algorithms);
    return chosen == Algorithm::one_shot ? reduce_one_shot(called, input, output, op, root, limits)
                                         : reduce_two_shot(called, input, output, op, root, limits);
  });
}

RawGroup::Work RawGroup::all_gather(InBytes input, std::vector<OutBytes> outputs, DType dtype, bool even,
                                    StartOptions options) {
  return start(std::move(options), [=, this](const WaitLimits& limits) {
    ExchangeStep step(size());
    step.give.assign(size(), input);
    for (std::size_t from = 0; from < size(); ++from) {
      step.take[from] = outputs[from].size();
      step.into.push_back(outputs[from].data());
    }
    return exchange(fingerprint_of(Operation::all_gather, dtype, even ? input.size() : uneven), std::move(step),
                    limits);
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
    ExchangeStep step(size());
    step.give = inputs;
    step.take.assign(size(), output.size());
    step.reduction = &op;
    step.dtype = dtype;
    step.out = output.data();
    step.count = output.size() / size_of(dtype);
    return exchange(fingerprint_of(Operation::reduce_scatter, dtype, total(inputs), no_root, op), std::move(step),
                    limits);
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
