/// What an agent lets its peers call and make by name: the functions and classes that rpc.expose() gave it.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>

#include "python/csrc/interpreter.h"

namespace tensorferry::python {

/// Of an agent that trusts nobody further than that (trust="registered"): what a peer asked for, and may not have. The
/// call is answered with PermissionDenied.
class Refused final : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Needs the GIL.
class Exposed final {
 public:
  /// Keeps `callable` under `name`. InvalidArgument: the name is not one that a user may serve, or belongs to another
  /// callable; where that has the same module and name, it was defined anew, and is replaced.
  void add(const std::string& name, const py::object& callable);

  [[nodiscard]] const std::map<std::string, py::object, std::less<>>& functions() const { return functions_; }
  /// What was exposed and travels as `wire_name` in a call that has the callable itself; null: nothing.
  [[nodiscard]] py::object known_as(std::string_view wire_name) const;
  /// Whether a class was exposed: its objects may be made, and their methods called, from afar.
  [[nodiscard]] bool has(PyTypeObject* type) const { return classes_.contains(type); }
  /// The exposed class of that module and qualified name; null: there is none. Imports nothing.
  [[nodiscard]] py::object class_named(std::string_view module, std::string_view qualname) const;
  /// The method `name` of `object`, bound to it: one that an exposed class, or a base of it, has itself, with a public
  /// name or `__call__`. Refused: another. Runs no code of the object's.
  [[nodiscard]] py::object method(const py::object& object, const std::string& name) const;

 private:
  std::map<std::string, py::object, std::less<>> functions_;
  std::unordered_map<PyTypeObject*, py::object> classes_;
};

}  // namespace tensorferry::python
