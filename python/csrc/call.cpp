#include "python/csrc/call.h"

#include <array>
#include <string>

#include "python/csrc/agent.h"
#include "python/csrc/errors.h"
#include "python/csrc/future.h"
#include "python/csrc/publish.h"
#include "python/csrc/references.h"

namespace tensorferry::python {
namespace {

/// The parameters of the verbs, in the order of their declaration (python/tensorferry/calls.py):
/// (to, func, args=None, kwargs=None, timeout=-1.0, *, require=None, out=None, device=None, wait_for_ready=False,
/// idempotent=False)
enum Parameter : std::size_t {
  to_parameter,
  func_parameter,
  args_parameter,
  kwargs_parameter,
  timeout_parameter,
  require_parameter,
  out_parameter,
  device_parameter,
  ready_parameter,
  idempotent_parameter,
  parameters
};
constexpr std::size_t positional_parameters = 5;
constexpr std::array<const char*, parameters> parameter_names{
    "to", "func", "args", "kwargs", "timeout", "require", "out", "device", "wait_for_ready", "idempotent"};

std::size_t parameter_of(PyObject* name) {
  static auto& interned = *new std::array<PyObject*, parameters>([] {
    std::array<PyObject*, parameters> out{};
    for (std::size_t i = 0; i < parameters; ++i) out[i] = PyUnicode_InternFromString(parameter_names[i]);
    return out;
  }());
  for (std::size_t i = 0; i < parameters; ++i) {
    if (name == interned[i]) return i;
  }
  for (std::size_t i = 0; i < parameters; ++i) {  // strings made at run time are not interned
    if (PyUnicode_CompareWithASCIIString(name, parameter_names[i]) == 0) return i;
  }
  return parameters;
}

/// Returns the order key of a call to `to`: that of a Peer handle; 0 for a name, a rank or a WorkerInfo.
std::uint32_t order_of(PyObject* to) {
  static auto* const name = PyUnicode_InternFromString("_order");
  // A lookup on the type raises no error, so that calls to a WorkerInfo do not pay for an AttributeError.
  if (PyUnicode_Check(to) != 0 || PyLong_Check(to) != 0 || _PyType_Lookup(Py_TYPE(to), name) == nullptr) return 0;
  return py::handle(to).attr(name).cast<std::uint32_t>();
}

/// The parsed arguments of one verb. Owns the objects that it made for `invocation`.
class Parsed {
 public:
  Parsed(const char* function, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    invocation.verb = function;
    if (static_cast<std::size_t>(count) > positional_parameters) {
      throw py::type_error(std::string(function) + "() takes at most 5 positional arguments");
    }
    std::array<PyObject*, parameters> given{};
    for (Py_ssize_t i = 0; i < count; ++i) given[static_cast<std::size_t>(i)] = args[i];
    const auto keywords = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < keywords; ++i) {
      auto* name = PyTuple_GET_ITEM(names, i);
      const auto parameter = parameter_of(name);
      if (parameter == parameters || given[parameter] != nullptr) {
        throw py::type_error(std::string(function) + "() got " +
                             (parameter == parameters ? "an unexpected" : "a second") + " argument " +
                             py::repr(name).cast<std::string>());
      }
      given[parameter] = args[count + i];
    }
    for (const auto parameter : {to_parameter, func_parameter}) {
      if (given[parameter] == nullptr) {
        throw py::type_error(std::string(function) + "() is missing the argument '" + parameter_names[parameter] + "'");
      }
    }
    fill(given);
  }

  CallArguments invocation;

 private:
  void fill(const std::array<PyObject*, parameters>& given) {
    invocation.to = given[to_parameter];
    invocation.order = order_of(invocation.to);
    invocation.function = given[func_parameter];
    args_ = py::reinterpret_borrow<py::object>(given[args_parameter]);
    if (!args_ || args_.is_none()) {
      args_ = py::tuple();
    } else if (PyTuple_Check(args_.ptr()) == 0 && !is_published(args_.ptr())) {
      if (!PySequence_Check(args_.ptr()) && !PyIter_Check(args_.ptr()) && !py::hasattr(args_, "__iter__")) {
        throw py::type_error("args must be a tuple of the function's arguments, not " +
                             text_attribute(py::type::handle_of(args_), "__qualname__") +
                             ": a tuple of one needs a comma, args=(x,)");
      }
      args_ = py::reinterpret_steal<py::object>(PySequence_Tuple(args_.ptr()));
      if (!args_) throw py::error_already_set();
    }
    invocation.args = args_.ptr();
    if (auto* kwargs = given[kwargs_parameter]; kwargs != nullptr && kwargs != Py_None) {
      if (PyDict_Check(kwargs) == 0) throw py::type_error("kwargs must be a dict or None");
      if (PyDict_GET_SIZE(kwargs) != 0) invocation.kwargs = kwargs;
    }
    if (auto* timeout = given[timeout_parameter]; timeout != nullptr) {
      invocation.timeout = PyFloat_AsDouble(timeout);
      if (invocation.timeout == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    }
    if (auto* require = given[require_parameter]; require != nullptr && require != Py_None) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(require, &size);
      if (text == nullptr) throw py::error_already_set();
      invocation.require = {text, static_cast<std::size_t>(size)};
    }
    if (auto* out = given[out_parameter]; out != nullptr && out != Py_None) invocation.out = out;
    if (auto* device = given[device_parameter]; device != nullptr && device != Py_None) invocation.device = device;
    if (auto* ready = given[ready_parameter]; ready != nullptr) invocation.wait_for_ready = PyObject_IsTrue(ready) == 1;
    if (auto* again = given[idempotent_parameter]; again != nullptr)
      invocation.idempotent = PyObject_IsTrue(again) == 1;
  }

  py::object args_;
};

/// Returns the agent of a verb: methods get it as `self`, functions get null.
std::shared_ptr<PythonAgent> agent_of(PyObject* self) {
  if (self == nullptr) return PythonAgent::current();
  return py::handle(self).cast<std::shared_ptr<PythonAgent>>();
}

PyObject* rpc_sync(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) noexcept {
  return guarded([&] {
    const auto agent = agent_of(self);
    const Parsed parsed("rpc_sync", args, count, names);
    return agent->call(agent->prepare(parsed.invocation)).release().ptr();
  });
}

PyObject* rpc_async(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) noexcept {
  return guarded([&] {
    const auto agent = agent_of(self);
    const Parsed parsed("rpc_async", args, count, names);
    return py::cast(PythonFuture::of(agent, agent->start(agent->prepare(parsed.invocation)))).release().ptr();
  });
}

PyObject* remote(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) noexcept {
  return guarded([&] {
    const auto agent = agent_of(self);
    const Parsed parsed("remote", args, count, names);
    if (parsed.invocation.out != nullptr) {
      throw py::type_error("remote() takes no out: its result stays at the peer. to_here() takes one");
    }
    return agent->objects().create(parsed.invocation).release().ptr();
  });
}

using Entry = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

Entry entry_of(const std::string& verb) {
  if (verb == "rpc_sync") return rpc_sync;
  if (verb == "rpc_async") return rpc_async;
  if (verb == "remote") return remote;
  throw py::value_error("C++ implements no verb \"" + verb + "\"");
}

/// Returns the definition of a verb, for one more function or method, which points into it: it is never destroyed.
PyMethodDef* define(const std::string& verb, const std::string& doc) {
  struct Definition {
    std::string name;
    std::string doc;
    PyMethodDef method;
  };
  auto& made = *new Definition{verb, doc, {}};
  made.method = {made.name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry_of(verb))),
                 METH_FASTCALL | METH_KEYWORDS, made.doc.c_str()};
  return &made.method;
}

py::object made(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

}  // namespace

void bind_calls(py::module_& module, const py::object& agent) {
  module.def(
      "make_method",
      [type = reinterpret_cast<PyTypeObject*>(agent.ptr())](const std::string& verb, const std::string& doc) {
        return made(PyDescr_NewMethod(type, define(verb, doc)));
      },
      py::arg("verb"), py::arg("doc"), "Returns a verb as a method of Agent. `doc` begins with the signature.");
  module.def(
      "make_function",
      [](const std::string& verb, const std::string& doc, const py::str& of_module) {
        return made(PyCFunction_NewEx(define(verb, doc), nullptr, of_module.ptr()));
      },
      py::arg("verb"), py::arg("doc"), py::arg("module"),
      "Returns a verb as a function of `module` that uses the current agent. `doc` begins with the signature.");
}

}  // namespace tensorferry::python
