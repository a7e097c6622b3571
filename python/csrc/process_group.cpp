#include "python/csrc/process_group.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/csrc/collectives.h"
#include "python/csrc/errors.h"
#include "python/csrc/interpreter.h"
#include "rpc/collectives/groups.h"
#include "rpc/collectives/torch/device_group.h"
#include "rpc/collectives/torch/interruptions.h"
#include "rpc/collectives/torch/process_group.h"
#include "rpc/regions/service.h"

namespace tensorferry::python {
namespace {

/// Holds an object as c10::intrusive_ptr does, and drops it without the GIL.
template <class T>
class IntrusiveWithoutGil final {
 public:
  IntrusiveWithoutGil() = default;
  IntrusiveWithoutGil(c10::intrusive_ptr<T> held) : held_(std::move(held)) {}  // NOLINT: pybind11 converts
  explicit IntrusiveWithoutGil(T* held) : held_(c10::intrusive_ptr<T>::unsafe_steal_from_new(held)) {}
  IntrusiveWithoutGil(const IntrusiveWithoutGil&) = default;
  IntrusiveWithoutGil(IntrusiveWithoutGil&&) = default;
  IntrusiveWithoutGil& operator=(const IntrusiveWithoutGil&) = default;
  IntrusiveWithoutGil& operator=(IntrusiveWithoutGil&&) = default;
  ~IntrusiveWithoutGil() {
    if (held_) drop_without_gil(std::move(held_));
  }
  T* get() const noexcept { return held_.get(); }
  T& operator*() const noexcept { return *held_; }
  T* operator->() const noexcept { return held_.get(); }
  explicit operator bool() const noexcept { return held_.defined(); }

 private:
  c10::intrusive_ptr<T> held_;
};

}  // namespace
}  // namespace tensorferry::python

// NOLINTNEXTLINE: as torch declares its own holders
PYBIND11_DECLARE_HOLDER_TYPE(T, tensorferry::python::IntrusiveWithoutGil<T>, true)

namespace tensorferry::python {
namespace {

using collectives::Groups;
using collectives::GroupSettings;
using collectives::TorchGroupOptions;
using collectives::TorchProcessGroup;

/// Returns the options with those that torch gives to a group. Torch's own default time-out does not count.
c10::intrusive_ptr<TorchGroupOptions> options_for(const TorchGroupOptions& given, std::string name, double timeout,
                                                  std::vector<std::uint64_t> global_ranks, bool reconfigures) {
  auto options = given.copy();
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  options->enable_reconfigure = reconfigures;
#else
  TORCH_CHECK_VALUE(!reconfigures, "this version of torch cannot reconfigure a process group");
#endif
  if (const auto asked = milliseconds_of(timeout); asked != kBackendDefaultTimeout) options->timeout = asked;
  options->settings.key = name;
  options->group_name = std::move(name);
  options->global_ranks_in_group = std::move(global_ranks);
  return options;
}

template <class Class, class Owner, class Field>
void bind_field(Class& bound, const char* name, Field Owner::*field) {
  const auto of = [](auto& self) -> auto& {
    if constexpr (std::is_same_v<Owner, GroupSettings>)
      return self.settings;
    else
      return self;
  };
  bound.def_property(
      name, [field, of](const TorchGroupOptions& self) { return of(self).*field; },
      [field, of](TorchGroupOptions& self, Field value) { of(self).*field = std::move(value); });
}

std::atomic<bool> keeps_threads{false};

/// At the interpreter's end torch's binding would take the GIL in a destructor, from which CPython unwinds the thread
/// although C++ forbids it. So a thread that waited in the backend stays here instead.
void stay_if_python_ends() {
  if (keeps_threads.load(std::memory_order_acquire) && ::gettid() != ::getpid()) sleep_for_ever();
}

}  // namespace

void bind_process_group(py::module_& module) {
  py::module_::import("torch.distributed");  // registers the base classes
  collectives::call_before_return(&stay_if_python_ends);
  module.def(
      "keep_waiting_threads",
      [] {
        keeps_threads.store(true, std::memory_order_release);
        collectives::keep_tensors_from_now();
      },
      "Lets no thread but the main one return from a call of the backend any more: the interpreter is about to end.");
  auto options = py::class_<TorchGroupOptions, c10d::Backend::Options, c10::intrusive_ptr<TorchGroupOptions>>(
      module, "ProcessGroupOptions", "The options of a process group of torch.distributed.");
  options.def(py::init([](std::optional<double> timeout) {
                auto out = c10::make_intrusive<TorchGroupOptions>();
                if (timeout) out->timeout = milliseconds_of(*timeout);
                return out;
              }),
              py::arg("timeout") = py::none());
  bind_field(options, "name", &GroupSettings::label);
  bind_field(options, "lazy", &TorchGroupOptions::lazy);
  bind_field(options, "algorithms", &GroupSettings::algorithms);
  bind_field(options, "board", &GroupSettings::board);
  bind_field(options, "memory", &GroupSettings::memory);
  bind_field(options, "host", &GroupSettings::host);
  bind_field(options, "interface", &TorchGroupOptions::interface);
  bind_field(options, "max_threads", &TorchGroupOptions::max_threads);
  options.def("check", [](const TorchGroupOptions& self) {
    check(collectives::parse_algorithms(self.settings.algorithms).status());
  });
  options.def("__copy__", &TorchGroupOptions::copy)
      .def(
          "__deepcopy__", [](const TorchGroupOptions& self, const py::dict&) { return self.copy(); }, py::arg("memo"));

  py::class_<TorchProcessGroup, c10d::Backend, IntrusiveWithoutGil<TorchProcessGroup>>(
      module, "ProcessGroup", "The backend of torch.distributed over a group.")
      .def(py::init(torch::wrap_pybind_function(
               [](const std::shared_ptr<Groups>& groups, const c10::intrusive_ptr<c10d::Store>& store, int rank,
                  int size, const TorchGroupOptions& given, std::string name, double timeout,
                  std::vector<std::uint64_t> global_ranks, const std::shared_ptr<regions::RegionService>& service,
                  bool enable_reconfigure) {
                 auto chosen =
                     options_for(given, std::move(name), timeout, std::move(global_ranks), enable_reconfigure);
                 chosen->regions = [weak = std::weak_ptr(service)] { return weak.lock(); };
                 const GilReleased released;
                 return TorchProcessGroup::meet_at(store, groups, rank, size, std::move(chosen));
               })),
           py::arg("groups"), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("name"),
           py::arg("timeout"), py::arg("global_ranks"), py::arg("regions"), py::arg("enable_reconfigure") = false)
      .def_property_readonly("group", torch::wrap_pybind_function_no_gil([](TorchProcessGroup& self) {
                               return shared_without_gil(self.shared_group());
                             }))
      // torch calls it at the ranks outside a new group if the default group is bound to a device.
      .def(
          "perform_nocolor_split", [](const TorchProcessGroup&, const py::object&) {}, py::arg("device"));
}

}  // namespace tensorferry::python
