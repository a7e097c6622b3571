/// The functions and classes that an agent exposes to its peers by name (rpc.expose()).
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Thrown by an agent with trust="registered" when a peer asks for something that was not exposed. The call is answered
/// with PermissionDenied; what() names the refused thing.
class Refused final : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The exposed functions and classes of one agent. Needs the GIL.
class Exposed final {
 public:
  /// Keeps `callable` under `name`, or replaces a callable of that name with the same module and qualified name, which
  /// was defined anew. InvalidArgument: users may not serve that name, or it belongs to another callable. TypeError:
  /// not callable.
  void add(const std::string& name, const py::object& callable);

  [[nodiscard]] const std::map<std::string, py::object, std::less<>>& functions() const { return functions_; }
  /// Parts with the callables: they may hold what holds this. The classes stay, because a late reply may need them.
  std::map<std::string, py::object, std::less<>> take_functions() { return std::exchange(functions_, {}); }
  /// Returns the exposed callable whose name in a request is `wire_name`, when the caller passes the callable itself.
  /// Null: none.
  [[nodiscard]] py::object known_as(std::string_view wire_name) const;
  /// Whether the class `type` was exposed. Peers may make its objects and call their methods.
  [[nodiscard]] bool has(PyTypeObject* type) const { return classes_.contains(type); }
  /// Returns the exposed class of that module and qualified name; null: none. Imports nothing.
  [[nodiscard]] py::object class_named(std::string_view module, std::string_view qualname) const;
  /// Returns the method `name` of `object`, bound to it. The object's class must be exposed, and the class or a base
  /// must define the method, with a public name or `__call__`; else throws Refused. Runs no code of the object.
  [[nodiscard]] py::object method(const py::object& object, const std::string& name) const;

 private:
  std::map<std::string, py::object, std::less<>> functions_;
  std::unordered_map<PyTypeObject*, py::object> classes_;
};

}  // namespace tensorferry::python
