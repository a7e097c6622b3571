#include "tensorferry/group.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "rpc/collectives/tensor_operations.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "tensorferry/agent.h"

namespace tensorferry {
namespace {

using collectives::GroupWork;
using collectives::StartOptions;

/// Access to the tensors of the C++ API, for TensorOperations.
struct TensorAccess {
  using Tensor = tensorferry::Tensor;
  static Status check(const Tensor& tensor) {
    if (tensor.device().type == DeviceType::cpu) return {};
    return {Code::invalid_argument, "a group takes tensors of the CPU, not of " + text_of(tensor.device())};
  }
  static DType dtype(const Tensor& tensor) { return tensor.dtype(); }
  static std::size_t elements(const Tensor& tensor) { return tensor.size(); }
  static bool is_dense(const Tensor& tensor) { return tensor.is_contiguous(); }
  static Tensor dense(const Tensor& tensor) { return tensor.contiguous(); }
  static Tensor empty_like(const Tensor& tensor) { return Tensor::empty(tensor.shape(), tensor.dtype()); }
  static void copy(const Tensor& to, const Tensor& from) { to.copy_from(from); }
  static std::span<std::byte> bytes(const Tensor& tensor) {
    return {static_cast<std::byte*>(tensor.raw()), tensor.bytes()};
  }
  static bool is_same(const Tensor& a, const Tensor& b) {
    return a.raw() == b.raw() && a.shape() == b.shape() && a.strides() == b.strides() && a.dtype() == b.dtype();
  }
  static StartOptions arrange(StartOptions options) { return options; }
  static bool is_direct() { return false; }
  static void release(std::vector<Tensor> tensors) { tensors.clear(); }
};
using Operations = collectives::TensorOperations<TensorAccess>;

StartOptions options_of(Group::Timeout timeout, std::string_view algorithm = {}) {
  if (timeout.count() < 0) throw InvalidArgument("the time-out of an operation of a group is negative");
  StartOptions out;
  out.timeout = timeout;
  out.algorithm = algorithm;
  return out;
}

/// The state of the future of an operation.
template <class T>
class Started final : public detail::Pending {
 public:
  Started(std::shared_ptr<GroupWork> work, detail::Stored<T> result)
      : work_(std::move(work)), result_(std::move(result)) {}
  bool wait(std::optional<detail::TimePoint> until) override {
    if (work_->done()) return true;
    const WaitInHandler place;
    return work_->wait(until);
  }
  bool done() override { return work_->done(); }
  void cancel() override {}  // the other ranks take part in the operation: only abort() ends it
  void on_done(std::unique_ptr<detail::Continuation> next) override {
    work_->on_done([next = std::move(next)](const Status&) { detail::run_guarded(*next); });
  }

  /// Returns the future of an operation that has been started, or throws why it has not.
  static Future<T> future(Operations::Started work, detail::Stored<T> result = {}) {
    auto state = std::make_shared<Started>(detail::value_or_throw(std::move(work)), std::move(result));
    return Future<T>(std::move(state), [](detail::Pending& pending) -> T {
      auto& self = static_cast<Started&>(pending);
      detail::check(self.work_->status());
      if constexpr (std::is_same_v<T, std::size_t>) {
        return self.work_->letter().from;
      } else if constexpr (!std::is_void_v<T>) {
        return std::move(self.result_);
      }
    });
  }

 private:
  const std::shared_ptr<GroupWork> work_;
  detail::Stored<T> result_;
};

Group::Tensors alike(const Tensor& tensor, std::size_t count) {
  Group::Tensors out;
  for (std::size_t i = 0; i < count; ++i) out.push_back(TensorAccess::empty_like(tensor));
  return out;
}

}  // namespace

class Group::State {
 public:
  State(std::shared_ptr<detail::AgentCore> its_agent, std::shared_ptr<collectives::RawGroup> raw)
      : core(std::move(its_agent)), operations(std::move(raw)) {}
  [[nodiscard]] collectives::RawGroup& raw() const { return operations.raw(); }

  static std::shared_ptr<Group> form(std::shared_ptr<detail::AgentCore> core, std::vector<std::string> names,
                                     GroupOptions options) {
    if (options.timeout.count() <= 0) throw InvalidArgument("the time-out of a group is not positive");
    collectives::GroupSettings settings;
    settings.label = std::move(options.label);
    settings.timeout = options.timeout;
    settings.algorithms = std::move(options.algorithms);
    settings.board = options.board;
    settings.memory = options.memory;
    settings.host = std::move(options.host);
    auto raw = detail::value_or_throw(core->groups->form(std::move(names), std::move(settings)));
    return std::shared_ptr<Group>(new Group(std::make_unique<State>(std::move(core), std::move(raw))));
  }
  /// Forms a group with the time-out of this one.
  [[nodiscard]] std::shared_ptr<Group> form_another(std::vector<std::string> names, const std::string& suffix) const {
    GroupOptions options;
    options.label = raw().settings().label + "/" + suffix;
    options.timeout = raw().settings().timeout;
    return form(core, std::move(names), std::move(options));
  }

  const std::shared_ptr<detail::AgentCore> core;
  const Operations operations;
};

std::shared_ptr<Group> Group::form(const Agent& agent, std::vector<std::string> names, GroupOptions options) {
  return State::form(agent.core(), std::move(names), std::move(options));
}

Group::Group(std::unique_ptr<State> state) : state_(std::move(state)) {}
Group::~Group() { close(); }

std::size_t Group::rank() const { return state_->raw().rank(); }
std::size_t Group::size() const { return state_->raw().size(); }
const std::vector<std::string>& Group::names() const { return state_->raw().names(); }
const std::string& Group::label() const { return state_->raw().settings().label; }

Future<void> Group::barrier(Timeout timeout) {
  return Started<void>::future(state_->raw().barrier(options_of(timeout)));
}

Future<Tensor> Group::broadcast(const Tensor& tensor, std::size_t root, Timeout timeout, std::string_view algorithm) {
  return Started<Tensor>::future(state_->operations.broadcast(tensor, root, options_of(timeout, algorithm)), tensor);
}

Future<Tensor> Group::all_reduce(const Tensor& tensor, ReduceOp op, Timeout timeout, std::string_view algorithm) {
  return all_reduce(tensor, tensor, std::move(op), timeout, algorithm);
}
Future<Tensor> Group::all_reduce(const Tensor& input, const Tensor& output, ReduceOp op, Timeout timeout,
                                 std::string_view algorithm) {
  return Started<Tensor>::future(
      state_->operations.all_reduce(input, output, std::move(op), options_of(timeout, algorithm)), output);
}

Future<Group::Tensors> Group::all_reduce_coalesced(Tensors tensors, ReduceOp op, Timeout timeout,
                                                   std::string_view algorithm) {
  auto started = state_->operations.all_reduce_coalesced(tensors, std::move(op), options_of(timeout, algorithm));
  return Started<Tensors>::future(std::move(started), std::move(tensors));
}

Future<Tensor> Group::reduce(const Tensor& tensor, std::size_t root, ReduceOp op, Timeout timeout,
                             std::string_view algorithm) {
  return reduce(tensor, tensor, root, std::move(op), timeout, algorithm);
}
Future<Tensor> Group::reduce(const Tensor& input, const Tensor& output, std::size_t root, ReduceOp op, Timeout timeout,
                             std::string_view algorithm) {
  return Started<Tensor>::future(
      state_->operations.reduce(input, output, std::move(op), root, options_of(timeout, algorithm)), output);
}

Future<Group::Tensors> Group::all_gather(const Tensor& input, Timeout timeout, std::string_view algorithm) {
  return all_gather(input, alike(input, size()), timeout, algorithm);
}
Future<Group::Tensors> Group::all_gather(const Tensor& input, Tensors outputs, Timeout timeout,
                                         std::string_view algorithm) {
  auto started = state_->operations.all_gather(input, outputs, options_of(timeout, algorithm));
  return Started<Tensors>::future(std::move(started), std::move(outputs));
}

Future<Group::Tensors> Group::gather(const Tensor& input, std::size_t root, Timeout timeout) {
  return gather(input, alike(input, rank() == root ? size() : 0), root, timeout);
}
Future<Group::Tensors> Group::gather(const Tensor& input, Tensors outputs, std::size_t root, Timeout timeout) {
  auto started = state_->operations.gather(input, outputs, root, options_of(timeout));
  return Started<Tensors>::future(std::move(started), std::move(outputs));
}

Future<Tensor> Group::scatter(const Tensors& inputs, const Tensor& output, std::size_t root, Timeout timeout) {
  return Started<Tensor>::future(state_->operations.scatter(inputs, output, root, options_of(timeout)), output);
}

Future<Tensor> Group::reduce_scatter(const Tensors& inputs, const Tensor& output, ReduceOp op, Timeout timeout,
                                     std::string_view algorithm) {
  return Started<Tensor>::future(
      state_->operations.reduce_scatter(inputs, output, std::move(op), options_of(timeout, algorithm)), output);
}

Future<Group::Tensors> Group::all_to_all(const Tensors& inputs, Tensors outputs, Timeout timeout) {
  auto started = state_->operations.all_to_all(inputs, outputs, false, options_of(timeout));
  return Started<Tensors>::future(std::move(started), std::move(outputs));
}

Future<void> Group::send(const Tensor& tensor, std::size_t to, std::uint64_t tag, Timeout timeout) {
  return Started<void>::future(state_->operations.send(tensor, to, tag, options_of(timeout)));
}

Future<std::size_t> Group::receive(const Tensor& tensor, std::optional<std::size_t> from, std::uint64_t tag,
                                   Timeout timeout) {
  const auto source = from.value_or(collectives::Mailbox::any_rank);
  return Started<std::size_t>::future(state_->operations.receive(tensor, source, tag, options_of(timeout)));
}

void Group::monitored_barrier(Timeout timeout, bool name_all) {
  const WaitInHandler place;
  detail::check(state_->raw().monitored_barrier(options_of(timeout).timeout, name_all));
}

std::shared_ptr<Group> Group::split(std::optional<std::int64_t> color, std::int64_t key) {
  const auto own = Tensor::from_vector<std::int64_t>({color.has_value() ? 1 : 0, color.value_or(0), key});
  const auto all = all_gather(own).get();
  if (!color) return nullptr;
  std::vector<std::pair<std::int64_t, std::size_t>> chosen;  // key and rank
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto asked = all[rank].elements<std::int64_t>();
    if (asked[0] != 0 && asked[1] == *color) chosen.emplace_back(asked[2], rank);
  }
  std::sort(chosen.begin(), chosen.end());
  std::vector<std::string> members;
  for (const auto& [_, rank] : chosen) members.push_back(names()[rank]);
  return state_->form_another(std::move(members), std::to_string(*color));
}

std::shared_ptr<Group> Group::merge(const std::vector<std::string>& more) {
  auto members = names();
  for (const auto& name : more) {
    if (std::find(members.begin(), members.end(), name) == members.end()) members.push_back(name);
  }
  return state_->form_another(std::move(members), "merged");
}

std::string Group::explain(std::string_view operation, std::size_t bytes) const {
  return state_->raw().explain(detail::value_or_throw(collectives::operation_of(operation)), bytes);
}

std::pair<std::uint64_t, std::uint64_t> Group::progress() const { return state_->raw().progress(); }
void Group::abort(const std::string& why) { state_->raw().abort(why); }
void Group::close() { state_->raw().close(); }

}  // namespace tensorferry
