/// Names of Python callables: the caller sends a name in place of the function, and the callee finds the function by
/// it.
///
///   py:<module>:<qualname>        the object that import and getattr find under that name
///   tf:call                       the callable itself is the first argument (bound methods, partials, ...)
///   tf:script:<qualified name>    a torch.jit.script function, looked up among those that the callee has compiled
///   tf:script-async:<...>         the same under functions.async_execution
///
/// All functions need the GIL.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// The name that a request carries for its function.
struct WireName {
  WireName(std::string n, bool first) : name(std::move(n)), by_value(first) {}
  std::string name;
  bool by_value;  // the callable is the first argument
};

/// Returns the name of `callable`: an importable name if that name leads to `callable` in this process now (so at the
/// peer too, if its module is the same), else that of a scripted function, else tf:call. The names are cached while
/// their callable lives. A str is itself the name of a function that the peer exposed. TypeError: not callable.
/// ValueError: a str that no peer can expose.
std::shared_ptr<const WireName> wire_name_of(py::handle callable);

/// Returns the name of `callable` for errors.
std::string name_for_people(py::handle callable);

/// Whether `callable` is decorated with functions.async_execution (ours or torch's): it then returns a future of its
/// result.
bool is_async_execution(py::handle callable);

/// Whether `name` has one of the forms that ServedFunction resolves.
bool is_python_function(std::string_view name);

/// A function that peers call by name. Each call looks it up in its module again, as a call in this process would, so
/// that a redefined function takes effect.
class ServedFunction {
 public:
  explicit ServedFunction(std::string_view name);

  struct Found {
    py::object callable;
    bool async = false;  // under functions.async_execution: returns a future of the result
  };
  /// Finds the function. For tf:call, it is `first`, the first argument. `peer` is the name of this agent, for the text
  /// of NotFound. Throws the exception of a failed import, or NotFound, as error_already_set.
  Found find(std::string_view peer, py::handle first);

  [[nodiscard]] std::string_view name() const { return name_; }
  /// Whether the name is tf:call: the callable is the first argument.
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
  py::object judged_;  // the callable that judged_async_ belongs to
  bool judged_async_ = false;
};

}  // namespace tensorferry::python
