#include "python/csrc/exposed.h"

#include <utility>

#include "python/csrc/errors.h"
#include "python/csrc/functions.h"
#include "rpc/core/envelope.h"

namespace tensorferry::python {
namespace {

constexpr std::size_t longest_name = 4096;  // bytes; docs/protocol.md, extension 1

/// Whether both come from the same definition (module and qualified name) of a function or class, one of them redefined
/// later.
bool same_definition(py::handle one, py::handle other) {
  const auto qualname = text_attribute(one, "__qualname__");
  return !qualname.empty() && qualname == text_attribute(other, "__qualname__") &&
         text_attribute(one, "__module__") == text_attribute(other, "__module__");
}

/// Whether the entry `found` of a class's dictionary is a method: not a property, nested class or value.
bool is_method(PyObject* found) {
  if (PyType_Check(found)) return false;
  return PyCallable_Check(found) != 0 || PyObject_TypeCheck(found, &PyClassMethod_Type) ||
         PyObject_TypeCheck(found, &PyStaticMethod_Type);
}

}  // namespace

void Exposed::add(const std::string& name, const py::object& callable) {
  const auto parsed = parse_function(name);
  if (!parsed || parsed->kind != FunctionKind::served || name.size() > longest_name) {
    raise(Status(Code::invalid_argument, "\"" + name.substr(0, 100) +
                                             "\" cannot name an exposed function: a name has 1 to 4096 bytes and does "
                                             "not begin with py:, op: or tf:"));
  }
  if (PyCallable_Check(callable.ptr()) == 0) {
    throw py::type_error("only functions and classes can be exposed, not " + py::repr(callable).cast<std::string>());
  }
  const auto [known, fresh] = functions_.try_emplace(name, callable);
  if (!fresh && !known->second.equal(callable) && !same_definition(known->second, callable)) {
    raise(Status(Code::invalid_argument, "\"" + name + "\" is exposed already, as " +
                                             py::repr(known->second).cast<std::string>() +
                                             ": give this one another name"));
  }
  known->second = callable;
  if (PyType_Check(callable.ptr()) != 0) {
    classes_.insert_or_assign(reinterpret_cast<PyTypeObject*>(callable.ptr()), callable);
  }
}

py::object Exposed::known_as(std::string_view wire_name) const {
  // Compares names at each call, not when the callable is exposed: while a decorator runs, its function is not in the
  // module yet.
  for (const auto& [name, callable] : functions_) {
    const auto known = wire_name_of(callable);
    if (!known->by_value && known->name == wire_name) return callable;
  }
  return {};
}

py::object Exposed::class_named(std::string_view module, std::string_view qualname) const {
  for (const auto& [type, object] : classes_) {
    if (text_attribute(object, "__qualname__") == qualname && text_attribute(object, "__module__") == module) {
      return object;
    }
  }
  return {};
}

py::object Exposed::method(const py::object& object, const std::string& name) const {
  auto* const type = Py_TYPE(object.ptr());
  const auto what = "method \"" + name.substr(0, 100) + "\" of a " + type->tp_name;
  if (!has(type)) throw Refused(what + ": the class was not exposed");
  if (name.starts_with('_') && name != "__call__") throw Refused(what + ": it is not a public one");
  const py::str key(name);
  const auto found = py::reinterpret_borrow<py::object>(_PyType_Lookup(type, key.ptr()));
  if (!found || !is_method(found.ptr())) throw Refused(what + ": the class has no such method");
  auto* const bind = Py_TYPE(found.ptr())->tp_descr_get;
  if (bind == nullptr) return found;
  auto bound = py::reinterpret_steal<py::object>(bind(found.ptr(), object.ptr(), reinterpret_cast<PyObject*>(type)));
  if (!bound) throw py::error_already_set();
  return bound;
}

}  // namespace tensorferry::python
