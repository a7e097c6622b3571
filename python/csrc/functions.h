/// Python callables by name: what a caller sends in a function's place, and what a callee makes of it.
///
///   py:<module>:<qualname>        whatever import and getattr find there
///   tf:call                       the callable itself comes first among the arguments (bound methods, partials, ...)
///   tf:script:<qualified name>    a torch.jit.script function, looked up among those that the callee has compiled
///   tf:script-async:<...>         the same under functions.async_execution
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// What a call says instead of its function.
struct WireName {
  WireName(std::string n, bool first) : name(std::move(n)), by_value(first) {}
  std::string name;
  bool by_value;  // the callable goes first among the arguments
};

/// The name of `callable`, which is found again under it here and now (so there too, if the module is the same), or
/// tf:call. Cached for as long as the callable lives. A str is the name itself, of what the peer exposed. TypeError:
/// not callable.
std::shared_ptr<const WireName> wire_name_of(py::handle callable);

/// What errors call `callable`.
std::string name_for_people(py::handle callable);

/// Whether `callable` is under functions.async_execution (ours or torch's): it returns a future of its result.
bool is_async_execution(py::handle callable);

/// Whether a name is ours to resolve.
bool is_python_function(std::string_view name);

/// A function that peers call by name. Looked up again in its module at each call, as a caller of it in this process
/// would, so that a function that was defined anew is the one that runs.
class ServedFunction {
 public:
  explicit ServedFunction(std::string_view name);

  struct Found {
    py::object callable;
    bool async = false;  // under functions.async_execution: returns a future of the result
  };
  /// With `first`, the first of the arguments, for tf:call. Throws what the import threw; NotFound (as
  /// error_already_set) says where `peer`, this agent, looked.
  Found find(std::string_view peer, py::handle first);

  [[nodiscard]] std::string_view name() const { return name_; }
  /// tf:call.
  [[nodiscard]] bool by_value() const { return by_value_; }

 private:
  py::object walk(std::string_view peer);
  bool is_async(const py::object& callable);

  std::string name_;
  bool by_value_ = false;
  bool script_ = false;
  bool script_async_ = false;
  std::string module_name_;
  std::string path_;
  py::object module_;
  std::vector<py::str> attributes_;
  py::object judged_;  // the callable that judged_async_ was found out about
  bool judged_async_ = false;
};

}  // namespace tensorferry::python
