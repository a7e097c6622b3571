#include "python/csrc/collectives.h"

#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "include/tensorferry/plugin.h"
#include "python/csrc/agent.h"
#include "python/csrc/errors.h"
#include "python/csrc/future.h"
#include "python/csrc/interpreter.h"
#include "python/csrc/process_group.h"
#include "rpc/collectives/groups.h"
#include "rpc/collectives/torch/device_group.h"
#include "rpc/collectives/torch/interruptions.h"
#include "rpc/collectives/torch/symmetric.h"
#include "rpc/tensor.h"

namespace tensorferry::python {
namespace {

using collectives::DeviceGroup;
using collectives::Groups;
using collectives::GroupSettings;
using collectives::Mailbox;
using collectives::RawGroup;
using collectives::StartOptions;
using collectives::TensorGroup;
using collectives::TensorWork;
using Tensors = std::vector<at::Tensor>;
using BoundGroup = py::class_<DeviceGroup, std::shared_ptr<DeviceGroup>>;

/// A reduction, and how the operation starts that uses it.
struct Chosen {
  ReduceOp op;
  StartOptions options;
};

/// A reduction that Python code does, on any thread. After an exception it does nothing more.
class PythonReduction final {
 public:
  explicit PythonReduction(py::function function) : function_(share_with_any_thread(std::move(function))) {}

  void combine(void* accumulator, const void* other, std::size_t count, DType dtype) {
    if (closing()) return;
    const GilHeld gil;
    if (!error_.empty()) return;
    try {
      reduce_by(*function_, accumulator, other, count, dtype);
    } catch (const std::exception& error) {
      error_ = error.what();
    }
  }
  /// Throws if the function has thrown.
  void check() const {
    const GilHeld gil;
    if (!error_.empty()) throw std::runtime_error("the function that reduces has raised " + error_);
  }

 private:
  const std::shared_ptr<py::function> function_;
  std::string error_;  // guarded by the GIL
};

StartOptions options_with(std::optional<double> timeout, std::string algorithm) {
  auto out = options_of(timeout);
  out.algorithm = std::move(algorithm);
  return out;
}

/// Returns the reduction that `op` names, or does: a function of two tensors.
Chosen chosen(const py::object& op, double factor, std::optional<double> timeout, std::string algorithm) {
  Chosen out{{}, options_with(timeout, std::move(algorithm))};
  if (PyCallable_Check(op.ptr()) != 0) {
    const auto reduction = std::make_shared<PythonReduction>(py::function(op));
    out.op.kind = Reduction::custom;
    out.op.combine = [reduction](void* into, const void* from, std::size_t count, DType dtype) {
      reduction->combine(into, from, count, dtype);
    };
    out.options.finish = [reduction] { reduction->check(); };
    return out;
  }
  const auto name = op.cast<std::string>();
  for (auto kind = Reduction::sum; kind < Reduction::custom;
       kind = static_cast<Reduction>(static_cast<std::uint8_t>(kind) + 1)) {
    if (name_of(kind) != name) continue;
    out.op.kind = kind;
    out.op.factor = factor;
    return out;
  }
  auto registered = Plugins::of_process().reduction(name);
  if (!registered.ok()) throw py::value_error(std::string(registered.status().what()));
  out.op = *std::move(registered);
  return out;
}

}  // namespace

void reduce_by(const py::function& function, void* accumulator, const void* other, std::size_t count, DType dtype) {
  const auto size = static_cast<std::int64_t>(count);
  const auto type = *scalar_type_of(dtype);
  const auto into = at::from_blob(accumulator, {size}, type);
  const auto from = at::from_blob(const_cast<void*>(other), {size}, type);
  const auto result = function(into, from);
  if (!result.is_none()) into.copy_(result.cast<at::Tensor>());
}

namespace {

/// Where an operation takes place if the ranks reach one another's GPUs: there, or in host memory.
enum class Way : std::uint8_t { direct, staged };
/// A reduction that the program does itself takes host memory.
Way way_of(const ReduceOp& op) { return op.kind == Reduction::custom ? Way::staged : Way::direct; }

/// Starts an operation on tensors, without the GIL, because it may run others' callbacks. `start` gets the group and
/// the options.
template <class Start>
TensorWork started(const DeviceGroup& self, std::string_view operation, std::initializer_list<at::TensorList> tensors,
                   StartOptions options, const Start& start, Way way = Way::direct) {
  std::optional<Result<TensorWork>> out;
  {
    const GilReleased released;
    const auto on = way == Way::staged ? self.staged_on(operation, tensors) : self.on(operation, tensors, options);
    if (on.ok()) {
      const auto work = start(*on, std::move(options));
      out.emplace(work.ok() ? Result<TensorWork>(TensorWork(*work, on->access())) : work.status());
    } else {
      out.emplace(on.status());
    }
  }
  return value_or_raise(*std::move(out));
}

void wait_for(const TensorWork& work, std::optional<double> timeout) {
  const auto until = deadline_after(timeout);
  bool ended = work.done();
  if (!ended) {
    const GilReleased released;
    ended = work.wait(until, [&] { return interrupted(released.state()); });
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (!ended)
    raise(Status(Code::deadline_exceeded, "the operation did not end within the time-out of wait(); it goes on"));
  check(work.status());
  work.block_current_stream();
}

void call_when_done(const TensorWork& work, py::function callback) {
  work.group_work()->on_done([kept = share_with_any_thread(std::move(callback))](const Status&) {
    if (closing()) return;
    const GilHeld gil;
    try {
      (*kept)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a callback of a collective operation");
    }
  });
}

std::shared_ptr<Groups> groups_of(PythonAgent& agent) {
  auto member = agent.member().shared_from_this();
  auto& raw = member->agent();
  return Groups::serve(std::shared_ptr<RawAgent>(std::move(member), &raw));
}

std::shared_ptr<DeviceGroup> form(Groups& groups, std::vector<std::string> names, const std::string& label,
                                  double timeout, const std::string& algorithms, bool board, bool memory,
                                  std::string host) {
  GroupSettings settings;
  settings.label = label;
  settings.timeout = milliseconds_of(timeout);
  settings.algorithms = algorithms;
  settings.board = board;
  settings.memory = memory;
  settings.host = std::move(host);
  std::optional<Result<std::shared_ptr<RawGroup>>> formed;
  {
    const GilReleased released;
    formed.emplace(collectives::run_interruptibly([self = groups.shared_from_this(), names = std::move(names),
                                                   settings] { return self->form(names, settings); }));
  }
  return shared_without_gil(std::make_shared<DeviceGroup>(value_or_raise(*std::move(formed))));
}

void bind_reductions(BoundGroup& group) {
  const auto timeout = py::arg("timeout") = py::none();
  const auto algorithm = py::arg("algorithm") = "";
  group
      .def(
          "all_reduce",
          [](const DeviceGroup& self, const at::Tensor& input, const at::Tensor& output, const py::object& op,
             double factor, std::optional<double> t, std::string by_algorithm) {
            auto [reduction, options] = chosen(op, factor, t, std::move(by_algorithm));
            const auto start = [&, &by = reduction](const TensorGroup& on, StartOptions with) {
              return on.all_reduce(input, output, by, std::move(with));
            };
            return started(self, "all_reduce", {input, output}, std::move(options), start, way_of(reduction));
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("factor"), timeout, algorithm)
      .def(
          "all_reduce_coalesced",
          [](const DeviceGroup& self, const Tensors& tensors, const py::object& op, double factor,
             std::optional<double> t, std::string by_algorithm) {
            auto [reduction, options] = chosen(op, factor, t, std::move(by_algorithm));
            const auto start = [&, &by = reduction](const TensorGroup& on, StartOptions with) {
              return on.all_reduce_coalesced(tensors, by, std::move(with));
            };
            return started(self, "all_reduce_coalesced", {tensors}, std::move(options), start, way_of(reduction));
          },
          py::arg("tensors"), py::arg("op"), py::arg("factor"), timeout, algorithm)
      .def(
          "all_reduce_sparse",
          [](const DeviceGroup& self, const at::Tensor& tensor, std::optional<double> t) {
            const auto start = [&](const TensorGroup& on, StartOptions with) {
              return on.all_reduce_sparse(tensor, std::move(with));
            };
            return started(self, "all_reduce_sparse", {tensor}, options_of(t), start, Way::staged);
          },
          py::arg("tensor"), timeout)
      .def(
          "reduce",
          [](const DeviceGroup& self, const at::Tensor& input, const at::Tensor& output, const py::object& op,
             double factor, std::size_t root, std::optional<double> t, std::string by_algorithm) {
            auto [reduction, options] = chosen(op, factor, t, std::move(by_algorithm));
            const auto start = [&, &by = reduction](const TensorGroup& on, StartOptions with) {
              return on.reduce(input, output, by, root, std::move(with));
            };
            return started(self, "reduce", {input, output}, std::move(options), start, way_of(reduction));
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("factor"), py::arg("root"), timeout, algorithm)
      .def(
          "reduce_scatter",
          [](const DeviceGroup& self, const Tensors& inputs, const at::Tensor& output, const py::object& op,
             double factor, std::optional<double> t, std::string by_algorithm) {
            auto [reduction, options] = chosen(op, factor, t, std::move(by_algorithm));
            const auto start = [&, &by = reduction](const TensorGroup& on, StartOptions with) {
              return on.reduce_scatter(inputs, output, by, std::move(with));
            };
            return started(self, "reduce_scatter", {inputs, output}, std::move(options), start, way_of(reduction));
          },
          py::arg("inputs"), py::arg("output"), py::arg("op"), py::arg("factor"), timeout, algorithm);
}

void bind_operations(BoundGroup& group) {
  const auto timeout = py::arg("timeout") = py::none();
  const auto algorithm = py::arg("algorithm") = "";
  group
      .def(
          "barrier",
          [](const DeviceGroup& self, std::optional<double> t) {
            return started(self, "barrier", {}, options_of(t), [](const TensorGroup& on, StartOptions with) {
              return TensorGroup::Started(on.raw().barrier(std::move(with)));
            });
          },
          timeout)
      .def(
          "broadcast",
          [](const DeviceGroup& self, const at::Tensor& tensor, std::size_t root, std::optional<double> t,
             std::string by_algorithm) {
            const auto start = [&](const TensorGroup& on, StartOptions with) {
              return on.broadcast(tensor, root, std::move(with));
            };
            return started(self, "broadcast", {tensor}, options_with(t, std::move(by_algorithm)), start);
          },
          py::arg("tensor"), py::arg("root"), timeout, algorithm)
      .def(
          "all_gather",
          [](const DeviceGroup& self, const at::Tensor& input, const Tensors& outputs, std::optional<double> t,
             std::string by_algorithm) {
            const auto start = [&](const TensorGroup& on, StartOptions with) {
              return on.all_gather(input, outputs, std::move(with));
            };
            return started(self, "all_gather", {input, outputs}, options_with(t, std::move(by_algorithm)), start);
          },
          py::arg("input"), py::arg("outputs"), timeout, algorithm);
}

void bind_exchanges(BoundGroup& group) {
  const auto timeout = py::arg("timeout") = py::none();
  group
      .def(
          "gather",
          [](const DeviceGroup& self, const at::Tensor& input, const Tensors& outputs, std::size_t root,
             std::optional<double> t) {
            return started(self, "gather", {input, outputs}, options_of(t),
                           [&](const TensorGroup& on, StartOptions with) {
                             return on.gather(input, outputs, root, std::move(with));
                           });
          },
          py::arg("input"), py::arg("outputs"), py::arg("root"), timeout)
      .def(
          "scatter",
          [](const DeviceGroup& self, const Tensors& inputs, const at::Tensor& output, std::size_t root,
             std::optional<double> t) {
            return started(self, "scatter", {inputs, output}, options_of(t),
                           [&](const TensorGroup& on, StartOptions with) {
                             return on.scatter(inputs, output, root, std::move(with));
                           });
          },
          py::arg("inputs"), py::arg("output"), py::arg("root"), timeout)
      .def(
          "all_to_all",
          [](const DeviceGroup& self, const Tensors& inputs, const Tensors& outputs, std::optional<double> t) {
            return started(self, "all_to_all", {inputs, outputs}, options_of(t),
                           [&](const TensorGroup& on, StartOptions with) {
                             return on.all_to_all(inputs, outputs, false, std::move(with));
                           });
          },
          py::arg("inputs"), py::arg("outputs"), timeout);
}

void bind_letters(BoundGroup& group) {
  const auto timeout = py::arg("timeout") = py::none();
  group
      .def(
          "send",
          [](const DeviceGroup& self, const at::Tensor& tensor, std::size_t to, std::uint32_t tag,
             std::optional<double> t) {
            const auto start = [&](const TensorGroup& on, StartOptions with) {
              return on.send(tensor, to, tag, std::move(with));
            };
            return started(self, "send", {tensor}, options_of(t), start, Way::staged);
          },
          py::arg("tensor"), py::arg("to"), py::arg("tag"), timeout)
      .def(
          "receive",
          [](const DeviceGroup& self, const at::Tensor& tensor, std::optional<std::size_t> from, std::uint32_t tag,
             std::optional<double> t) {
            const auto start = [&](const TensorGroup& on, StartOptions with) {
              return on.receive(tensor, from.value_or(Mailbox::any_rank), tag, std::move(with));
            };
            return started(self, "receive", {tensor}, options_of(t), start, Way::staged);
          },
          py::arg("tensor"), py::arg("source"), py::arg("tag"), timeout);
}

std::vector<std::tuple<std::string, std::string, std::string, std::uint64_t>> paths_of(const RawGroup& group) {
  std::vector<std::tuple<std::string, std::string, std::string, std::uint64_t>> out;
  for (const auto& each : group.paths()) {
    out.emplace_back(name_of(each.operation), name_of(each.path), each.algorithm, each.count);
  }
  return out;
}
void bind_work(py::module_& module) {
  py::class_<TensorWork>(module, "GroupWork", "An operation of a group that has been started.")
      .def("wait", &wait_for, py::arg("timeout") = py::none())
      .def("done", &TensorWork::done)
      // After the end of the GroupWork: raises its error, or orders the current stream behind the results.
      .def("take",
           [](const TensorWork& self) {
             check(self.status());
             self.block_current_stream();
           })
      .def_property_readonly("source", [](const TensorWork& self) { return self.group_work()->letter().from; })
      .def("on_done", &call_when_done, py::arg("callback"));
}

void bind_state(BoundGroup& group) {
  group.def_property_readonly("rank", [](const DeviceGroup& self) { return self.raw().rank(); })
      .def_property_readonly("size", [](const DeviceGroup& self) { return self.raw().size(); })
      .def_property_readonly("names", [](const DeviceGroup& self) { return self.raw().names(); })
      .def_property_readonly("label", [](const DeviceGroup& self) { return self.raw().settings().label; })
      .def_property_readonly("progress", [](const DeviceGroup& self) { return self.raw().progress(); })
      .def_property_readonly("paths", [](const DeviceGroup& self) { return paths_of(self.raw()); })
      .def("explain",
           [](const DeviceGroup& self, const std::string& operation, std::size_t bytes) {
             return self.raw().explain(value_or_raise(collectives::operation_of(operation)), bytes);
           })
      .def(
          "tuning_key",
          [](const DeviceGroup& self, bool gpu) {
            using Key = std::tuple<std::string, std::string, std::size_t, std::string>;
            const auto key =
                gpu ? self.raw().gpu_tuning_key() : std::optional(collectives::host_tuning_key(self.raw().size()));
            return key ? std::optional<Key>({key->topology, key->device, key->ranks, key->version}) : std::nullopt;
          },
          py::arg("gpu"))
      .def("check", [](const DeviceGroup& self) { check(self.raw().failed()); })
      .def("abort",
           [](const DeviceGroup& self, const std::string& why) {
             const GilReleased released;
             self.raw().abort(why);
           })
      .def("close",
           [](const DeviceGroup& self) {
             const GilReleased released;
             self.drain();  // else the others could take this rank's last operations for unfinished ones
             self.raw().close();
           })
      .def("monitored_barrier", [](const DeviceGroup& self, double timeout, bool name_all) {
        Status status;
        {
          const GilReleased released;
          status =
              collectives::run_interruptibly([group = self.raw().shared_from_this(), time = milliseconds_of(timeout),
                                              name_all] { return group->monitored_barrier(time, name_all); });
        }
        check(status);
      });
}

void bind_groups(py::module_& module) {
  py::class_<Groups, std::shared_ptr<Groups>>(module, "Groups", "The groups of one agent.")
      .def(py::init(&groups_of), py::arg("agent"))
      .def("form", &form, py::arg("names"), py::arg("label"), py::arg("timeout"), py::arg("algorithms"),
           py::arg("board"), py::arg("memory"), py::arg("host"))
      .def("in_use", &Groups::in_use)
      .def(
          "observe",
          [](const Groups& self) {
            std::vector<std::tuple<std::string, std::size_t, std::size_t, std::pair<std::uint64_t, std::uint64_t>>> out;
            for (const auto& each : self.living()) {
              out.emplace_back(each->settings().label, each->rank(), each->size(), each->progress());
            }
            return out;
          },
          "The groups that exist: label, rank, size, and the numbers of the operations that were started and ended "
          "last.")
      .def(
          "paths",
          [](const Groups& self) {
            std::vector<std::tuple<std::string, std::string, std::string, std::string, std::uint64_t>> out;
            for (const auto& each : self.living()) {
              for (const auto& [operation, path, algorithm, count] : paths_of(*each)) {
                out.emplace_back(each->settings().label, operation, path, algorithm, count);
              }
            }
            return out;
          },
          "How many operations have begun: label, operation, path, algorithm and number.")
      .def("leave", [](Groups& self) {
        const GilReleased released;
        self.leave();
      });
}

}  // namespace

std::chrono::milliseconds milliseconds_of(double seconds) {
  if (!(seconds >= 0)) throw py::value_error("a time-out is at least 0");
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::min(seconds, 1e9) * 1000 + 0.5));
}

collectives::StartOptions options_of(std::optional<double> timeout) {
  collectives::StartOptions out;
  if (timeout) out.timeout = std::max(milliseconds_of(*timeout), std::chrono::milliseconds(1));
  return out;
}

std::shared_ptr<DeviceGroup> shared_without_gil(std::shared_ptr<DeviceGroup> group) {
  auto* const shown = group.get();
  return {shown, [kept = std::move(group)](DeviceGroup*) mutable { drop_without_gil(std::move(kept)); }};
}

void bind_collectives(py::module_& module) {
  collectives::handle_signals_by({&handles_signals, &run_signal_handlers});
  bind_work(module);
  BoundGroup group(module, "Group", "A group of agents.");
  bind_state(group);
  bind_operations(group);
  bind_exchanges(group);
  bind_letters(group);
  bind_reductions(group);
  bind_groups(module);
  bind_process_group(module);
  module.def(
      "mark_symmetric", [](const at::Tensor& tensor) { check(collectives::mark_symmetric(tensor)); }, py::arg("tensor"),
      "Lets the ranks of groups read inputs in the memory of a tensor of a GPU in place.");
  module.def("tuning_file", &collectives::tuning_file, "The path of the file in which `tensorferry tune` writes.");
}

}  // namespace tensorferry::python
