#include "python/csrc/collectives.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/csrc/agent.h"
#include "python/csrc/errors.h"
#include "python/csrc/future.h"
#include "rpc/collectives/groups.h"
#include "rpc/collectives/torch/process_group.h"
#include "rpc/collectives/torch/tensor_group.h"

namespace tensorferry::python {
namespace {

using collectives::Groups;
using collectives::GroupSettings;
using collectives::GroupWork;
using collectives::Mailbox;
using collectives::Operation;
using collectives::RawGroup;
using collectives::StartOptions;
using collectives::TensorGroup;
using Tensors = std::vector<at::Tensor>;
using Work = std::shared_ptr<GroupWork>;

std::chrono::milliseconds milliseconds_of(double seconds) {
  if (!(seconds >= 0)) throw py::value_error("a time-out is at least 0");
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::min(seconds, 1e9) * 1000 + 0.5));
}

StartOptions options_of(std::optional<double> timeout) {
  StartOptions out;
  if (timeout) out.timeout = std::max(milliseconds_of(*timeout), std::chrono::milliseconds(1));
  return out;
}

ReduceOp op_of(const std::string& name, double factor) {
  for (auto kind = Reduction::sum; kind < Reduction::custom;
       kind = static_cast<Reduction>(static_cast<std::uint8_t>(kind) + 1)) {
    if (name_of(kind) != name) continue;
    ReduceOp op(kind);
    op.factor = factor;
    return op;
  }
  throw py::value_error("there is no reduction \"" + name + "\"");
}

/// Starts an operation without the GIL, because it may run others' callbacks.
template <class Start>
Work started(const Start& start) {
  std::optional<TensorGroup::Started> out;
  {
    const GilReleased released;
    out.emplace(start());
  }
  return value_or_raise(*std::move(out));
}

void wait_for(const Work& work, std::optional<double> timeout) {
  const auto until = deadline_after(timeout);
  bool ended = work->done();
  if (!ended) {
    const GilReleased released;
    ended = work->wait(until, [&] { return interrupted(released.state()); });
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (!ended)
    raise(Status(Code::deadline_exceeded, "the operation did not end within the time-out of wait(); it goes on"));
  check(work->status());
}

void call_when_done(const Work& work, py::function callback) {
  work->on_done([kept = share_with_any_thread(std::move(callback))](const Status&) {
    if (closing()) return;
    const GilHeld gil;
    try {
      (*kept)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a callback of a collective operation");
    }
  });
}

Operation operation_of(const std::string& name) {
  for (std::uint8_t i = 0; i <= static_cast<std::uint8_t>(Operation::last); ++i) {
    if (collectives::name_of(static_cast<Operation>(i)) == name) return static_cast<Operation>(i);
  }
  throw py::value_error("there is no operation \"" + name + "\"");
}

std::shared_ptr<Groups> groups_of(PythonAgent& agent) {
  auto member = agent.member().shared_from_this();
  auto& raw = member->agent();
  return Groups::serve(std::shared_ptr<RawAgent>(std::move(member), &raw));
}

std::shared_ptr<TensorGroup> form(Groups& groups, std::vector<std::string> names, const std::string& label,
                                  double timeout, const std::string& algorithms, bool board, bool memory) {
  GroupSettings settings;
  settings.label = label;
  settings.timeout = milliseconds_of(timeout);
  settings.algorithms = algorithms;
  settings.board = board;
  settings.memory = memory;
  std::optional<Result<std::shared_ptr<RawGroup>>> formed;
  {
    const GilReleased released;
    formed.emplace(groups.form(std::move(names), std::move(settings)));
  }
  return std::make_shared<TensorGroup>(value_or_raise(*std::move(formed)));
}

void bind_operations(py::class_<TensorGroup, std::shared_ptr<TensorGroup>>& group) {
  const auto timeout = py::arg("timeout") = py::none();
  group
      .def(
          "barrier",
          [](const TensorGroup& self, std::optional<double> t) {
            return started([&]() -> TensorGroup::Started { return self.raw().barrier(options_of(t)); });
          },
          timeout)
      .def(
          "broadcast",
          [](const TensorGroup& self, const at::Tensor& tensor, std::size_t root, std::optional<double> t) {
            return started([&] { return self.broadcast(tensor, root, options_of(t)); });
          },
          py::arg("tensor"), py::arg("root"), timeout)
      .def(
          "all_reduce",
          [](const TensorGroup& self, const at::Tensor& input, const at::Tensor& output, const std::string& op,
             double factor, std::optional<double> t) {
            const auto reduction = op_of(op, factor);
            return started([&] { return self.all_reduce(input, output, reduction, options_of(t)); });
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("factor"), timeout)
      .def(
          "all_reduce_coalesced",
          [](const TensorGroup& self, const Tensors& tensors, const std::string& op, double factor,
             std::optional<double> t) {
            const auto reduction = op_of(op, factor);
            return started([&] { return self.all_reduce_coalesced(tensors, reduction, options_of(t)); });
          },
          py::arg("tensors"), py::arg("op"), py::arg("factor"), timeout)
      .def(
          "reduce",
          [](const TensorGroup& self, const at::Tensor& input, const at::Tensor& output, const std::string& op,
             double factor, std::size_t root, std::optional<double> t) {
            const auto reduction = op_of(op, factor);
            return started([&] { return self.reduce(input, output, reduction, root, options_of(t)); });
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("factor"), py::arg("root"), timeout)
      .def(
          "all_gather",
          [](const TensorGroup& self, const at::Tensor& input, const Tensors& outputs, std::optional<double> t) {
            return started([&] { return self.all_gather(input, outputs, options_of(t)); });
          },
          py::arg("input"), py::arg("outputs"), timeout)
      .def(
          "gather",
          [](const TensorGroup& self, const at::Tensor& input, const Tensors& outputs, std::size_t root,
             std::optional<double> t) {
            return started([&] { return self.gather(input, outputs, root, options_of(t)); });
          },
          py::arg("input"), py::arg("outputs"), py::arg("root"), timeout)
      .def(
          "scatter",
          [](const TensorGroup& self, const Tensors& inputs, const at::Tensor& output, std::size_t root,
             std::optional<double> t) {
            return started([&] { return self.scatter(inputs, output, root, options_of(t)); });
          },
          py::arg("inputs"), py::arg("output"), py::arg("root"), timeout)
      .def(
          "reduce_scatter",
          [](const TensorGroup& self, const Tensors& inputs, const at::Tensor& output, const std::string& op,
             double factor, std::optional<double> t) {
            const auto reduction = op_of(op, factor);
            return started([&] { return self.reduce_scatter(inputs, output, reduction, options_of(t)); });
          },
          py::arg("inputs"), py::arg("output"), py::arg("op"), py::arg("factor"), timeout)
      .def(
          "all_to_all",
          [](const TensorGroup& self, const Tensors& inputs, const Tensors& outputs, std::optional<double> t) {
            return started([&] { return self.all_to_all(inputs, outputs, false, options_of(t)); });
          },
          py::arg("inputs"), py::arg("outputs"), timeout)
      .def(
          "send",
          [](const TensorGroup& self, const at::Tensor& tensor, std::size_t to, std::uint32_t tag,
             std::optional<double> t) { return started([&] { return self.send(tensor, to, tag, options_of(t)); }); },
          py::arg("tensor"), py::arg("to"), py::arg("tag"), timeout)
      .def(
          "receive",
          [](const TensorGroup& self, const at::Tensor& tensor, std::optional<std::size_t> from, std::uint32_t tag,
             std::optional<double> t) {
            const auto source = from.value_or(Mailbox::any_rank);
            return started([&] { return self.receive(tensor, source, tag, options_of(t)); });
          },
          py::arg("tensor"), py::arg("source"), py::arg("tag"), timeout);
}

}  // namespace

void bind_collectives(py::module_& module) {
  py::class_<GroupWork, Work>(module, "GroupWork", "An operation of a group that has been started.")
      .def("wait", &wait_for, py::arg("timeout") = py::none())
      .def("done", &GroupWork::done)
      .def("check", [](const GroupWork& self) { check(self.status()); })
      .def_property_readonly("source", [](const GroupWork& self) { return self.letter().from; })
      .def("on_done", &call_when_done, py::arg("callback"));
  auto group = py::class_<TensorGroup, std::shared_ptr<TensorGroup>>(module, "Group", "A group of agents.");
  group.def_property_readonly("rank", [](const TensorGroup& self) { return self.raw().rank(); })
      .def_property_readonly("size", [](const TensorGroup& self) { return self.raw().size(); })
      .def_property_readonly("names", [](const TensorGroup& self) { return self.raw().names(); })
      .def_property_readonly("label", [](const TensorGroup& self) { return self.raw().settings().label; })
      .def_property_readonly("progress", [](const TensorGroup& self) { return self.raw().progress(); })
      .def("explain", [](const TensorGroup& self, const std::string& operation,
                         std::size_t bytes) { return self.raw().explain(operation_of(operation), bytes); })
      .def("check", [](const TensorGroup& self) { check(self.raw().failed()); })
      .def("abort",
           [](const TensorGroup& self, const std::string& why) {
             const GilReleased released;
             self.raw().abort(why);
           })
      .def("close",
           [](const TensorGroup& self) {
             const GilReleased released;
             self.raw().close();
           })
      .def("monitored_barrier", [](const TensorGroup& self, double timeout, bool name_all) {
        Status status;
        {
          const GilReleased released;
          status = self.raw().monitored_barrier(milliseconds_of(timeout), name_all);
        }
        check(status);
      });
  bind_operations(group);
  py::class_<Groups, std::shared_ptr<Groups>>(module, "Groups", "The groups of one agent.")
      .def(py::init(&groups_of), py::arg("agent"))
      .def("form", &form, py::arg("names"), py::arg("label"), py::arg("timeout"), py::arg("algorithms"),
           py::arg("board"), py::arg("memory"))
      .def("leave", [](Groups& self) {
        const GilReleased released;
        self.leave();
      });
  module.def(
      "process_group",
      [](const TensorGroup& tensors, double timeout) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<collectives::TorchProcessGroup>(tensors.raw().shared_from_this(),
                                                                   milliseconds_of(timeout));
      },
      py::arg("group"), py::arg("timeout"), "Returns a backend of torch.distributed over the group.");
}

}  // namespace tensorferry::python
