#include "python/csrc/functions.h"

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "python/csrc/errors.h"
#include "rpc/core/envelope.h"

namespace tensorferry::python {
namespace {

constexpr std::string_view call_by_value = "tf:call";
constexpr std::string_view script_prefix = "tf:script:";
constexpr std::string_view script_async_prefix = "tf:script-async:";
constexpr const char* async_attribute = "_wrapped_async_rpc_function";  // torch's decorator sets it too

py::object attribute_or_null(py::handle object, const char* name) {
  return py::reinterpret_steal<py::object>(PyObject_GetAttrString(object.ptr(), name));
}
py::object attribute_or_none(py::handle object, const char* name) {
  auto found = attribute_or_null(object, name);
  if (!found) {
    PyErr_Clear();
    return py::none();
  }
  return found;
}

std::vector<py::str> split_path(std::string_view path) {
  std::vector<py::str> parts;
  for (std::size_t at = 0; at <= path.size();) {
    const auto dot = std::min(path.find('.', at), path.size());
    PyObject* part = PyUnicode_FromStringAndSize(path.data() + at, static_cast<Py_ssize_t>(dot - at));
    if (part == nullptr) throw py::error_already_set();
    PyUnicode_InternInPlace(&part);
    parts.push_back(py::reinterpret_steal<py::str>(part));
    at = dot + 1;
  }
  return parts;
}

/// Returns the object at `path` in `object`; null, with no error set, if there is none.
py::object walk_path(py::object object, const std::vector<py::str>& path) {
  for (const auto& part : path) {
    object = py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), part.ptr()));
    if (!object) {
      PyErr_Clear();
      return {};
    }
  }
  return object;
}

/// Whether `module` and `path` lead to `callable` in this process.
bool leads_to(py::handle callable, const std::string& module, const std::string& path) {
  if (module.empty() || path.empty() || path.find('<') != std::string::npos) return false;  // <lambda>, <locals>
  auto* loaded = PyDict_GetItemString(PyImport_GetModuleDict(), module.c_str());
  if (loaded == nullptr) return false;
  const auto found = walk_path(py::reinterpret_borrow<py::object>(loaded), split_path(path));
  if (!found) return false;
  if (found.is(callable)) return true;
  // A class method is bound anew at each access.
  return PyMethod_Check(found.ptr()) && PyMethod_Check(callable.ptr()) && found.equal(callable);
}

std::string text_or_empty(const py::object& object) {
  return PyUnicode_Check(object.ptr()) ? object.cast<std::string>() : std::string();
}

std::optional<std::string> importable_name(py::handle callable) {
  const auto try_name = [&](const std::string& module, const std::string& path) -> std::optional<std::string> {
    if (!leads_to(callable, module, path)) return std::nullopt;
    return python_function(module, path);
  };
  const auto module = text_or_empty(attribute_or_none(callable, "__module__"));
  const auto qualname = text_or_empty(attribute_or_none(callable, "__qualname__"));
  if (auto found = try_name(module, qualname)) return found;
  // torch.add has the qualified name "_VariableFunctionsClass.add", but torch has it by its `__name__`.
  if (auto found = try_name(module, text_or_empty(attribute_or_none(callable, "__name__")))) return found;
  // torch.Tensor.add, str.upper: unbound methods in C have a class (`__objclass__`) instead of a module.
  if (const auto owner = attribute_or_none(callable, "__objclass__"); !owner.is_none()) {
    if (auto found = try_name(text_or_empty(attribute_or_none(owner, "__module__")), qualname)) return found;
  }
  // dict.fromkeys: class methods in C have their class as `__self__`.
  if (const auto owner = attribute_or_none(callable, "__self__"); PyType_Check(owner.ptr())) {
    if (auto found = try_name(text_or_empty(attribute_or_none(owner, "__module__")), qualname)) return found;
  }
  // torch.ops.aten.add and torch.ops.aten.add.Tensor print as their path below torch.ops.
  if (module.starts_with("torch._ops")) return try_name("torch", "ops." + py::str(callable).cast<std::string>());
  return std::nullopt;
}

bool is_script_function(py::handle callable) {
  return PyObject_IsInstance(callable.ptr(), attribute_of("torch._C", "ScriptFunction").ptr()) == 1;
}

std::string script_name(py::handle function) { return py::str(function.attr("qualified_name")).cast<std::string>(); }

WireName find_name(py::handle callable) {
  if (auto name = importable_name(callable)) return {std::move(*name), false};
  if (is_script_function(callable)) return {std::string(script_prefix) + script_name(callable), false};
  const auto wrapped = attribute_or_none(callable, async_attribute);
  if (!wrapped.is_none() && is_script_function(wrapped)) {
    return {std::string(script_async_prefix) + script_name(wrapped), false};
  }
  return {std::string(call_by_value), true};
}

struct CachedName {
  std::shared_ptr<const WireName> name;
  py::object holder;  // a weak reference, or the callable itself if its type has no weak references
  bool weak = false;

  [[nodiscard]] bool stands_for(PyObject* callable) const {
    return weak ? PyWeakref_GetObject(holder.ptr()) == callable : holder.ptr() == callable;
  }
};

std::unordered_map<PyObject*, CachedName>& cache() {
  static auto& names = *new std::unordered_map<PyObject*, CachedName>;  // never destroyed: outlives the interpreter
  return names;
}

/// Returns the WireName of a name that the user gives as a str. Programs use few such names, so they are cached.
std::shared_ptr<const WireName> exposed_name(std::string name) {
  static auto& known = *new std::unordered_map<std::string, std::shared_ptr<const WireName>>;
  constexpr std::size_t most = 1024;
  if (const auto found = known.find(name); found != known.end()) return found->second;
  const auto parsed = parse_function(name);
  if (!parsed || parsed->kind == FunctionKind::internal) {
    throw py::value_error("\"" + name + "\" is not the name of a function that a peer can expose");
  }
  if (known.size() >= most) known.clear();
  auto made = std::make_shared<const WireName>(name, false);
  known.emplace(std::move(name), made);
  return made;
}

[[noreturn]] void not_found(const std::string& what) {
  set_error(Status(Code::not_found, what));
  throw py::error_already_set();
}

}  // namespace

std::shared_ptr<const WireName> wire_name_of(py::handle callable) {
  const auto found = cache().find(callable.ptr());
  if (found != cache().end() && found->second.stands_for(callable.ptr())) return found->second.name;

  if (PyUnicode_Check(callable.ptr()) != 0) return exposed_name(callable.cast<std::string>());
  if (PyCallable_Check(callable.ptr()) == 0) {
    throw py::type_error("function should be callable, or the name of one that the peer exposed, not " +
                         py::repr(callable).cast<std::string>());
  }
  static const auto& by_value = *new auto(std::make_shared<const WireName>(std::string(call_by_value), true));
  // A bound method is a new object at each access, so it is not cached; its instance travels with it.
  if (PyMethod_Check(callable.ptr()) && !PyType_Check(PyMethod_GET_SELF(callable.ptr()))) return by_value;

  auto name = find_name(callable);
  if (name.by_value) return by_value;
  CachedName entry{std::make_shared<const WireName>(std::move(name)), {}, true};
  entry.holder = py::reinterpret_steal<py::object>(PyWeakref_NewRef(callable.ptr(), nullptr));
  if (!entry.holder) {
    PyErr_Clear();
    entry.holder = py::reinterpret_borrow<py::object>(callable);
    entry.weak = false;
  }
  return cache().insert_or_assign(callable.ptr(), std::move(entry)).first->second.name;
}

std::string name_for_people(py::handle callable) {
  auto name = text_or_empty(attribute_or_none(callable, "__qualname__"));
  if (name.empty()) name = text_or_empty(attribute_or_none(py::type::handle_of(callable), "__qualname__"));
  return name;
}

bool is_async_execution(py::handle callable) { return py::hasattr(callable, async_attribute); }

bool is_python_function(std::string_view name) {
  return name.starts_with("py:") || name == call_by_value || name.starts_with(script_prefix) ||
         name.starts_with(script_async_prefix);
}

ServedFunction::ServedFunction(std::string_view name) : name_(name) {
  if (name == call_by_value) {
    by_value_ = true;
  } else if (name.starts_with(script_prefix)) {
    script_ = true;
    path_ = name.substr(script_prefix.size());
  } else if (name.starts_with(script_async_prefix)) {
    script_ = script_async_ = true;
    path_ = name.substr(script_async_prefix.size());
  } else if (const auto parts = parse_function(name)) {
    module_name_ = parts->scope;
    path_ = parts->name;
  }
}

ServedFunction::Found ServedFunction::find(std::string_view peer, py::handle first) {
  if (by_value_) {
    auto callable = py::reinterpret_borrow<py::object>(first);
    const bool async = is_async_execution(callable);
    return {std::move(callable), async};
  }
  auto callable = walk(peer);
  const bool async = script_ ? script_async_ : is_async(callable);
  return {std::move(callable), async};
}

py::object ServedFunction::walk(std::string_view peer) {
  const auto here = " on \"" + std::string(peer) + "\"";
  if (script_) {
    auto found = attribute_of("torch.jit._state", "_python_cu").attr("find_function")(path_);
    if (found.is_none()) {
      not_found("there is no scripted function \"" + path_ + "\"" + here +
                ": the module that defines it must be imported there");
    }
    return found;
  }
  if (module_name_.empty()) not_found("\"" + name_ + "\" is not the name of a Python function");
  if (!module_) {
    module_ = py::reinterpret_steal<py::object>(PyImport_ImportModule(module_name_.c_str()));
    if (!module_) {
      if (!PyErr_ExceptionMatches(PyExc_ModuleNotFoundError)) throw py::error_already_set();
      const py::error_already_set error;
      not_found("no module \"" + module_name_ + "\"" + here + " (" + py::str(error.value()).cast<std::string>() +
                "): it must be importable there too, to call \"" + path_ + "\"");
    }
    attributes_ = split_path(path_);
  }
  auto found = walk_path(module_, attributes_);
  if (found) return found;
  if (module_name_ == "__main__") {
    not_found("there is no \"" + path_ + "\" in __main__" + here +
              ", which runs another program: put the function in a module that both import");
  }
  not_found("there is no \"" + path_ + "\" in module \"" + module_name_ + "\"" + here);
}

bool ServedFunction::is_async(const py::object& callable) {
  if (!callable.is(judged_)) {
    judged_async_ = is_async_execution(callable);
    judged_ = callable;
  }
  return judged_async_;
}

}  // namespace tensorferry::python
