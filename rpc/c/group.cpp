#include "tensorferry/group.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rpc/c/calls.h"
#include "rpc/c/error.h"
#include "rpc/c/options.h"

using namespace tensorferry;     // NOLINT(google-build-using-namespace): the functions below are C's
using namespace tensorferry::c;  // NOLINT(google-build-using-namespace)

/// A group, and the events of its agent.
struct tferry_group {
  std::shared_ptr<Group> group;
  std::shared_ptr<Events> events;
};

namespace {

/// The arrays and options of one operation.
struct Operands {
  Group::Tensors inputs, outputs;
  ReduceOp reduction;
  std::size_t root = 0;
  Group::Timeout timeout{};
  std::uint64_t tag = 0;

  /// Returns the only input, or output. Throws InvalidArgument if there is another number.
  [[nodiscard]] const Tensor& input() const { return only(inputs, "input"); }
  [[nodiscard]] const Tensor& output() const { return only(outputs, "output"); }

 private:
  static const Tensor& only(const Group::Tensors& tensors, const char* what) {
    if (tensors.size() == 1) return tensors.front();
    throw InvalidArgument("the operation takes one " + std::string(what) + ", not " + std::to_string(tensors.size()));
  }
};

Group::Tensors tensors_of(const tferry_value* values, std::size_t count, const std::shared_ptr<void>& owner) {
  ValueList list(values, count, owner);
  Group::Tensors out;
  for (std::size_t i = 0; i < count; ++i) out.push_back(list.tensor());
  return out;
}

Operands operands_of(const tferry_group& group, const tferry_group_options& options, const tferry_value* inputs,
                     std::size_t input_count, const tferry_value* outputs, std::size_t output_count) {
  if (options.reduction < 0 || options.reduction >= static_cast<std::int32_t>(Reduction::custom)) {
    throw InvalidArgument("there is no reduction " + std::to_string(options.reduction));
  }
  const auto owner = group.events->owner_of(options.memory);
  Operands out;
  out.inputs = tensors_of(inputs, input_count, owner);
  out.outputs = tensors_of(outputs, output_count, owner);
  out.reduction = static_cast<Reduction>(options.reduction);
  out.reduction.factor = options.factor;
  out.root = options.root;
  out.timeout = Group::Timeout(options.timeout_ms);
  out.tag = options.tag;
  return out;
}

/// Makes a handle of a group's future. The outputs are the caller's own, so the result is empty.
template <class T>
tferry_future* handle_of(const tferry_group& group, Future<T> future) {
  const auto take = future.taker();
  return new tferry_future{group.events, std::move(future).release(), [take](detail::Pending& pending) {
                             auto out = std::make_unique<tferry_message>();
                             if constexpr (std::is_same_v<T, std::size_t>) {
                               tferry_value rank{};
                               rank.kind = TFERRY_INTEGER;
                               rank.integer = static_cast<std::int64_t>(take(pending));
                               out->values.push_back(rank);
                             } else {
                               take(pending);
                             }
                             return out;
                           }};
}

tferry_future* start(const tferry_group& handle, std::int32_t operation, Operands given) {
  auto& group = *handle.group;
  const auto timeout = given.timeout;
  const bool is_root = given.root == group.rank();
  switch (operation) {
    case TFERRY_BARRIER:
      return handle_of(handle, group.barrier(timeout));
    case TFERRY_BROADCAST:
      return handle_of(handle, group.broadcast(given.input(), given.root, timeout));
    case TFERRY_ALL_REDUCE:
      return handle_of(handle, group.all_reduce(given.input(), given.output(), given.reduction, timeout));
    case TFERRY_REDUCE:
      return handle_of(handle, group.reduce(given.input(), is_root ? given.output() : given.input(), given.root,
                                            given.reduction, timeout));
    case TFERRY_ALL_GATHER:
      return handle_of(handle, group.all_gather(given.input(), std::move(given.outputs), timeout));
    case TFERRY_GATHER:
      return handle_of(handle, group.gather(given.input(), std::move(given.outputs), given.root, timeout));
    case TFERRY_SCATTER:
      return handle_of(handle, group.scatter(given.inputs, given.output(), given.root, timeout));
    case TFERRY_REDUCE_SCATTER:
      return handle_of(handle, group.reduce_scatter(given.inputs, given.output(), given.reduction, timeout));
    case TFERRY_ALL_TO_ALL:
      return handle_of(handle, group.all_to_all(given.inputs, std::move(given.outputs), timeout));
    case TFERRY_SEND:
      return handle_of(handle, group.send(given.input(), given.root, given.tag, timeout));
    case TFERRY_RECEIVE:
      return handle_of(
          handle, group.receive(given.output(), given.root == UINT64_MAX ? std::nullopt : std::optional(given.root),
                                given.tag, timeout));
    default:
      throw InvalidArgument("there is no operation " + std::to_string(operation));
  }
}

}  // namespace

tferry_error* tferry_group_form(tferry_agent* agent, const char* const* names, size_t name_count,
                                const char* const* options, size_t count, tferry_group** group) {
  return guarded([&] {
    GroupOptions parsed;
    read_options(options, count,
                 {
                     {"label", text_into(parsed.label)},
                     {"timeout", seconds_into(parsed.timeout)},
                     {"algorithms", text_into(parsed.algorithms)},
                     {"board", boolean_into(parsed.board)},
                     {"memory", boolean_into(parsed.memory)},
                     {"host", text_into(parsed.host)},
                 });
    auto formed = Group::form(*agent->agent, {names, names + name_count}, std::move(parsed));
    *group = new tferry_group{std::move(formed), agent->events};
  });
}

size_t tferry_group_rank(const tferry_group* group) { return group->group->rank(); }
size_t tferry_group_size(const tferry_group* group) { return group->group->size(); }

tferry_error* tferry_group_start(tferry_group* group, int32_t operation, const tferry_group_options* options,
                                 const tferry_value* inputs, size_t input_count, const tferry_value* outputs,
                                 size_t output_count, tferry_future** future) {
  return guarded([&] {
    auto given = operands_of(*group, *options, inputs, input_count, outputs, output_count);
    *future = start(*group, operation, std::move(given));
  });
}

void tferry_group_abort(tferry_group* group, const char* why) { group->group->abort(why); }

void tferry_group_free(tferry_group* group) {
  if (group == nullptr) return;
  group->group->close();
  delete group;
}
