// The operations of a group, as steps.
#include <algorithm>
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

Asked asked_for(Operation operation, std::size_t bytes, const StartOptions& options, bool in_turn = true,
                bool even = true) {
  Asked out;
  out.operation = operation;
  out.bytes = bytes;
  out.in_turn = in_turn;
  out.even = even;
  out.gpu = options.device != nullptr;
  return out;
}

Fingerprint on(const std::shared_ptr<DeviceOperations>& device, Fingerprint called,
               std::optional<Algorithm> wanted = std::nullopt) {
  if (device) called.device = device->number();
  if (wanted) called.reduction |= (static_cast<std::uint8_t>(*wanted) + 1U) << Fingerprint::algorithm_shift;
  return called;
}

}  // namespace

Result<std::optional<Algorithm>> RawGroup::find_algorithm(std::string_view name, Asked asked) const {
  if (name.empty()) return std::optional<Algorithm>();
  asked.ranks = size();
  asked.links = links();
  auto found = collectives::find_algorithm(asked, name);
  if (!found.ok()) return found.status();
  return std::optional<Algorithm>(*found);
}

RawGroup::Work RawGroup::refuse(Status why) {
  auto work = std::make_shared<GroupWork>(shared_from_this(), nullptr, clock().now());
  work->end(std::move(why));
  return work;
}

Algorithm RawGroup::choose(const Asked& asked, std::optional<Algorithm> wanted, bool staged) {
  auto complete = asked;
  complete.ranks = size();
  complete.links = links();
  return ways_.choose(complete, wanted, staged);
}

RawGroup::Work RawGroup::perform(StartOptions options, Run run) { return start(std::move(options), std::move(run)); }

Status RawGroup::agree_on(const Fingerprint& called, const WaitLimits& limits) {
  return size() == 1 ? failed() : performing(called, limits).meet();
}

Status RawGroup::give_to_all(const Fingerprint& called, InBytes own, const std::vector<OutBytes>& all,
                             const WaitLimits& limits) {
  ExchangeStep step(size());
  step.agreed = true;
  step.give.assign(size(), own);
  for (std::size_t from = 0; from < size(); ++from) {
    step.take[from] = all[from].size();
    step.into.push_back(all[from].data());
  }
  return performing(called, limits).step(std::move(step));
}

Status RawGroup::tell_each_other(const Fingerprint& called, InBytes own, OutBytes all, const WaitLimits& limits) {
  ExchangeStep step(size());
  step.give.assign(size(), own);
  step.take.assign(size(), own.size());
  for (std::size_t from = 0; from < size(); ++from) step.into.push_back(all.data() + from * own.size());
  return performing(called, limits).step(std::move(step));
}

RawGroup::Work RawGroup::barrier(StartOptions options) {
  return start(std::move(options), [this](const WaitLimits& limits) {
    ways_.counts().count(Operation::barrier, false, Algorithm::direct);
    return performing(fingerprint_of(Operation::barrier, DType::uint8, 0), limits).meet();
  });
}

RawGroup::Work RawGroup::broadcast(OutBytes data, DType dtype, std::size_t root, StartOptions options) {
  const auto device = options.device;
  const auto asked = asked_for(Operation::broadcast, data.size(), options);
  const auto wanted = find_algorithm(options.algorithm, asked);
  if (!wanted.ok()) return refuse(wanted.status());
  const bool staged = options.staged;
  return start(std::move(options), [=, this, wanted = *wanted](const WaitLimits& limits) {
    const auto called =
        on(device, fingerprint_of(Operation::broadcast, dtype, data.size(), static_cast<std::int32_t>(root)), wanted);
    if (device) return device->broadcast(called, data, root, limits);
    const auto algorithm = choose(asked, wanted, staged);
    const auto now = performing(called, limits);
    if (algorithm == Algorithm::ring) return broadcast_by_ring(now, data, root);
    if (algorithm == Algorithm::two_level) return broadcast_two_level(now, levels_, data, root);
    ExchangeStep step(size());
    step.into.assign(size(), data.data());
    if (rank() == root) step.give.assign(size(), data);
    step.take[root] = data.size();
    return performing(called, limits).step(std::move(step));
  });
}

Status RawGroup::reduce_by(Algorithm algorithm, const Performing& now, InBytes input, OutBytes output,
                           const ReduceOp& op, std::size_t root) const {
  if (algorithm == Algorithm::ring) return reduce_by_ring(now, input, output, op, root);
  if (algorithm == Algorithm::two_level) return reduce_two_level(now, levels_, input, output, op, root);
  if (algorithm == Algorithm::one_shot) return reduce_one_shot(now, input, output, op, root);
  return reduce_two_shot(now, input, output, op, root);
}

RawGroup::Work RawGroup::all_reduce(InBytes input, OutBytes output, DType dtype, ReduceOp op, StartOptions options) {
  const auto device = options.device;
  const auto asked = asked_for(Operation::all_reduce, input.size(), options, reduces_in_turn(op, dtype));
  const auto wanted = find_algorithm(options.algorithm, asked);
  if (!wanted.ok()) return refuse(wanted.status());
  const bool staged = options.staged;
  return start(std::move(options), [=, this, wanted = *wanted, op = std::move(op)](const WaitLimits& limits) -> Status {
    const auto called = on(device, fingerprint_of(Operation::all_reduce, dtype, input.size(), no_root, op), wanted);
    if (device) return device->reduce(called, input, output, op, Mailbox::any_rank, limits);
    return reduce_by(choose(asked, wanted, staged), performing(called, limits), input, output, op, Mailbox::any_rank);
  });
}

RawGroup::Work RawGroup::reduce(InBytes input, OutBytes output, DType dtype, ReduceOp op, std::size_t root,
                                StartOptions options) {
  const auto device = options.device;
  const auto asked = asked_for(Operation::reduce, input.size(), options, reduces_in_turn(op, dtype));
  const auto wanted = find_algorithm(options.algorithm, asked);
  if (!wanted.ok()) return refuse(wanted.status());
  const bool staged = options.staged;
  return start(std::move(options), [=, this, wanted = *wanted, op = std::move(op)](const WaitLimits& limits) -> Status {
    const auto called =
        on(device, fingerprint_of(Operation::reduce, dtype, input.size(), static_cast<std::int32_t>(root), op), wanted);
    if (device) return device->reduce(called, input, output, op, root, limits);
    return reduce_by(choose(asked, wanted, staged), performing(called, limits), input, output, op, root);
  });
}

RawGroup::Work RawGroup::all_gather(InBytes input, std::vector<OutBytes> outputs, DType dtype, bool even,
                                    StartOptions options) {
  const auto device = options.device;
  const auto asked = asked_for(Operation::all_gather, total(outputs), options, true, even);
  const auto wanted = find_algorithm(options.algorithm, asked);
  if (!wanted.ok()) return refuse(wanted.status());
  const bool staged = options.staged;
  return start(std::move(options), [=, this, wanted = *wanted](const WaitLimits& limits) {
    const auto called = on(device, fingerprint_of(Operation::all_gather, dtype, even ? input.size() : uneven), wanted);
    if (device) return device->gather(called, input, outputs, Mailbox::any_rank, even, limits);
    if (choose(asked, wanted, staged) == Algorithm::ring) {
      return all_gather_by_ring(performing(called, limits), input, outputs);
    }
    ExchangeStep step(size());
    step.give.assign(size(), input);
    for (std::size_t from = 0; from < size(); ++from) {
      step.take[from] = outputs[from].size();
      step.into.push_back(outputs[from].data());
    }
    return performing(called, limits).step(std::move(step));
  });
}

RawGroup::Work RawGroup::gather(InBytes input, std::vector<OutBytes> outputs, DType dtype, std::size_t root,
                                StartOptions options) {
  const auto device = options.device;
  const bool staged = options.staged;
  return start(std::move(options), [=, this](const WaitLimits& limits) {
    const bool even = std::all_of(outputs.begin(), outputs.end(),
                                  [&](const OutBytes& piece) { return piece.size() == input.size(); });
    const auto called = on(device, fingerprint_of(Operation::gather, dtype, even ? input.size() : uneven,
                                                  static_cast<std::int32_t>(root)));
    if (device) return device->gather(called, input, outputs, root, true, limits);
    ways_.counts().count(Operation::gather, staged, Algorithm::direct);
    ExchangeStep step(size());
    step.give[root] = input;
    step.into.assign(size(), nullptr);
    for (std::size_t from = 0; rank() == root && from < size(); ++from) {
      step.take[from] = outputs[from].size();
      step.into[from] = outputs[from].data();
    }
    return performing(called, limits).step(std::move(step));
  });
}

RawGroup::Work RawGroup::scatter(std::vector<InBytes> inputs, OutBytes output, DType dtype, std::size_t root,
                                 StartOptions options) {
  const auto device = options.device;
  const bool staged = options.staged;
  return start(std::move(options), [=, this](const WaitLimits& limits) {
    const bool even =
        std::all_of(inputs.begin(), inputs.end(), [&](const InBytes& piece) { return piece.size() == output.size(); });
    const auto called = on(device, fingerprint_of(Operation::scatter, dtype, even ? output.size() : uneven,
                                                  static_cast<std::int32_t>(root)));
    if (device) return device->scatter(called, inputs, output, root, limits);
    ways_.counts().count(Operation::scatter, staged, Algorithm::direct);
    ExchangeStep step(size());
    if (rank() == root) step.give = inputs;
    step.into.assign(size(), output.data());
    step.take[root] = output.size();
    return performing(called, limits).step(std::move(step));
  });
}

RawGroup::Work RawGroup::reduce_scatter(std::vector<InBytes> inputs, OutBytes output, DType dtype, ReduceOp op,
                                        StartOptions options) {
  const auto device = options.device;
  const bool even =
      std::all_of(inputs.begin(), inputs.end(), [&](const InBytes& piece) { return piece.size() == output.size(); });
  const auto asked = asked_for(Operation::reduce_scatter, total(inputs), options, reduces_in_turn(op, dtype), even);
  const auto wanted = find_algorithm(options.algorithm, asked);
  if (!wanted.ok()) return refuse(wanted.status());
  const bool staged = options.staged;
  return start(std::move(options), [=, this, wanted = *wanted, op = std::move(op)](const WaitLimits& limits) {
    const auto called = on(
        device, fingerprint_of(Operation::reduce_scatter, dtype, even ? total(inputs) : uneven, no_root, op), wanted);
    if (device) return device->reduce_scatter(called, inputs, output, op, even, limits);
    if (choose(asked, wanted, staged) == Algorithm::ring) {
      return reduce_scatter_by_ring(performing(called, limits), inputs, output, op);
    }
    ExchangeStep step(size());
    step.give = inputs;
    step.take.assign(size(), output.size());
    step.reduction = &op;
    step.dtype = dtype;
    step.out = output.data();
    step.count = output.size() / size_of(dtype);
    return performing(called, limits).step(std::move(step));
  });
}

RawGroup::Work RawGroup::all_to_all(std::vector<InBytes> inputs, std::vector<OutBytes> outputs, DType dtype, bool even,
                                    StartOptions options) {
  const auto device = options.device;
  const bool staged = options.staged;
  return start(std::move(options), [=, this](const WaitLimits& limits) {
    const auto called = on(device, fingerprint_of(Operation::all_to_all, dtype, even ? total(inputs) : uneven));
    if (device) return device->all_to_all(called, inputs, outputs, even, limits);
    ways_.counts().count(Operation::all_to_all, staged, Algorithm::direct);
    ExchangeStep step(size());
    step.give = inputs;
    for (std::size_t from = 0; from < size(); ++from) {
      step.take[from] = outputs[from].size();
      step.into.push_back(outputs[from].data());
    }
    return performing(called, limits).step(std::move(step));
  });
}

}  // namespace tensorferry::collectives
