#include "python/csrc/call.h"

#include <array>
#include <deque>
#include <string>

#include "python/csrc/agent.h"
#include "python/csrc/errors.h"
#include "python/csrc/future.h"
#include "python/csrc/publish.h"
#include "python/csrc/references.h"

namespace tensorferry::python {
namespace {

/// The parameters of the verbs, in the order of their signature:
/// (to, func, args=None, kwargs=None, timeout=-1.0, *, require=None, out=None, device=None,
/// wait_for_ready=False, _order=0)
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
  order_parameter,
  parameters
};
constexpr std::size_t positional_parameters = 5;
constexpr std::array<const char*, parameters> parameter_names{"to",      "func", "args",   "kwargs",         "timeout",
                                                              "require", "out",  "device", "wait_for_ready", "_order"};

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

  Invocation invocation;

 private:
  void fill(const std::array<PyObject*, parameters>& given) {
    invocation.to = given[to_parameter];
    invocation.function = given[func_parameter];
    args_ = py::reinterpret_borrow<py::object>(given[args_parameter]);
    if (!args_ || args_.is_none()) {
      args_ = py::tuple();
    } else if (PyTuple_Check(args_.ptr()) == 0 && !is_published(args_.ptr())) {
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
    if (auto* order = given[order_parameter]; order != nullptr)
      invocation.order = py::handle(order).cast<std::uint32_t>();
  }

  py::object args_;
};

/// Runs `body`, and sets the Python error for an exception that it throws.
template <class Body>
PyObject* guarded(Body body) noexcept {
  try {
    return body().release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

/// Returns the agent of a verb: module functions get the module as `self`, methods an agent.
std::shared_ptr<PythonAgent> agent_of(PyObject* self) {
  if (self == nullptr || PyModule_Check(self)) return PythonAgent::current();
  return py::handle(self).cast<std::shared_ptr<PythonAgent>>();
}

PyObject* rpc_sync(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return guarded([&] {
    const auto agent = agent_of(self);
    const Parsed parsed("rpc_sync", args, count, names);
    return agent->call(agent->prepare(parsed.invocation));
  });
}

PyObject* rpc_async(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return guarded([&] {
    const auto agent = agent_of(self);
    const Parsed parsed("rpc_async", args, count, names);
    return py::cast(Future::of(agent, agent->start(agent->prepare(parsed.invocation))));
  });
}

PyObject* remote(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return guarded([&] {
    const auto agent = agent_of(self);
    const Parsed parsed("remote", args, count, names);
    if (parsed.invocation.out != nullptr) {
      throw py::type_error("remote() takes no out: its result stays at the peer. to_here() takes one");
    }
    return agent->objects().create(parsed.invocation);
  });
}

constexpr const char* rpc_sync_doc =
    R"(rpc_sync(to, func, args=None, kwargs=None, timeout=-1.0, *, require=None, out=None, device=None, wait_for_ready=False)
--

Calls a function on a peer and waits for its result.

Args:
    to: the peer: its name, its rank, or a :class:`WorkerInfo`. An agent may call itself: values are copied then too.
    func: a module-level function, a class, a bound method (its object travels), a torch operator, or a scripted function;
        or, as a str, the name of a function that the peer exposed (:func:`expose`), in Python or in C++.
    args: the positional arguments, a tuple.
    kwargs: the keyword arguments, a dict.
    timeout: seconds; 0: none; -1: the default that ``init_rpc`` was given (60).
    require: the only channel that may carry tensors, such as ``"basic"``. Its probe, where it has one, is waited for.
    out: a dense tensor, on the CPU or a GPU, that the result, one tensor of the same dtype and shape, is to land in.
        Where it is contiguous the bytes arrive there without another copy; else they are copied there. Do not touch it
        meanwhile. Nothing is written to it after the call has ended, by a time-out for one; where that is with an
        error, what it holds is undefined. On a GPU it is written in the order of the stream that is current here.
    device: where tensors among the arguments land at the peer: one of its devices (``"cuda:1"``, ``1``, ``"cpu"``), for
        all of them; or a dict of devices here to devices there, one to one, by which the tensors of the result come
        back the other way. None: the agent's device map for the peer, else the device of the same index, else its first
        GPU, else its CPU.
    wait_for_ready: wait up to the time-out for a peer that has not joined yet, or is about to restart, instead of
        failing. A call that was sent to a peer which then died fails all the same: nothing is sent twice.

Returns:
    What ``func(*args, **kwargs)`` returned there; ``out`` where it is given.

Raises:
    DeadlineExceeded, ConnectionLost, NotFound, PermissionDenied, ChannelUnavailable: see :mod:`tensorferry.errors`.
    ChannelUnavailable: also where the function returned memory marked by :func:`share`, which cannot land in ``out``.
    InvalidArgument: the peer has no such device.
    ValueError: the result has another dtype or shape than ``out``; ``out`` is sparse, requires grad, or is on a GPU
        that the agent does not use.
    TypeError: the result is not one tensor although ``out`` is given, or ``out`` is none; or a value cannot be sent,
        such as a tensor on a GPU while a CUDA graph is being captured there.
    Exception: whatever ``func`` raised, as its own type where that can be rebuilt, else as :class:`RemoteError`.

Example::

    total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    rpc.rpc_sync("worker1", torch.add, args=(total, 1), out=total)
)";

constexpr const char* rpc_async_doc =
    R"(rpc_async(to, func, args=None, kwargs=None, timeout=-1.0, *, require=None, out=None, device=None, wait_for_ready=False)
--

Calls a function on a peer and returns a :class:`Future` of its result at once.

Tensors among the arguments may be written again when the future has completed, or its ``sent`` has; ``out`` is filled
when the future has completed. Of a result on GPUs the streams that are current where :meth:`Future.wait` is called wait
for it; no thread does.

Args:
    to, func, args, kwargs, timeout, require, out, device, wait_for_ready: as :func:`rpc_sync` takes them.

Returns:
    A :class:`Future`. Where it is dropped the call goes on.

Raises:
    What the arguments' pickling raises; ``DeadlineExceeded`` after :func:`deadline`. What the call itself raises, waiting
    for the future raises.

Example::

    futures = [rpc.rpc_async(worker, torch.sum, args=(torch.ones(10),)) for worker in ("worker1", "server")]
    assert tensorferry.wait_all(futures) == [10, 10]
)";

constexpr const char* remote_doc =
    R"(remote(to, func, args=None, kwargs=None, timeout=-1.0, *, require=None, device=None, wait_for_ready=False)
--

Calls a function on a peer, where its result stays, and returns an :class:`RRef` to it at once.

Args:
    to, func, args, kwargs, timeout, require, device: as :func:`rpc_sync` takes them. The time-out is of the object's making.
        The object's tensors stay on their devices there.
    wait_for_ready: as there, but it is ``remote`` itself that waits for the peer.

Returns:
    An :class:`RRef`, which can be used and passed on at once.

Raises:
    What the arguments' pickling raises; NotFound: there is no such peer; DeadlineExceeded: ``wait_for_ready`` waited in
    vain. An exception that ``func`` raises is kept there, and raised at each use of the reference; so is InvalidArgument,
    where the peer has no such device.

Example::

    model = rpc.remote("server", torch.nn.Linear, args=(784, 10))
    assert model.rpc_sync().forward(torch.ones(784)).shape == (10,)
)";

using Entry = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

PyMethodDef definition(const char* name, Entry entry, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry)), METH_FASTCALL | METH_KEYWORDS, doc};
}

/// Returns the definition of the same verb as a method: its documented signature begins with self.
PyMethodDef method_of(const PyMethodDef& function) {
  static auto& docs = *new std::deque<std::string>;  // never destroyed: the methods point into it
  auto& doc = docs.emplace_back(function.ml_doc);
  doc.insert(doc.find('(') + 1, "$self, ");
  auto method = function;
  method.ml_doc = doc.c_str();
  return method;
}

}  // namespace

void bind_calls(py::module_& module, const py::object& agent) {
  static std::array<PyMethodDef, 4> definitions{definition("rpc_sync", rpc_sync, rpc_sync_doc),
                                                definition("rpc_async", rpc_async, rpc_async_doc),
                                                definition("remote", remote, remote_doc), PyMethodDef{}};
  if (PyModule_AddFunctions(module.ptr(), definitions.data()) != 0) throw py::error_already_set();
  static auto& methods = *new std::deque<PyMethodDef>;
  for (const auto& function : definitions) {
    if (function.ml_name == nullptr) break;
    auto* method =
        PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(agent.ptr()), &methods.emplace_back(method_of(function)));
    if (method == nullptr) throw py::error_already_set();
    agent.attr(function.ml_name) = py::reinterpret_steal<py::object>(method);
  }
}

}  // namespace tensorferry::python
