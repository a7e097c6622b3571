#include "python/csrc/publish.h"

#include <torch/csrc/utils/pybind.h>

#include <new>
#include <utility>

#include "python/csrc/agent.h"
#include "python/csrc/codec.h"
#include "python/csrc/errors.h"
#include "python/csrc/functions.h"

namespace tensorferry::python {
namespace {

struct PublishedHandle {
  PyObject_HEAD std::shared_ptr<const Published> value;
};

PyTypeObject* handle_type = nullptr;

PublishedHandle& handle_of(PyObject* self) { return *reinterpret_cast<PublishedHandle*>(self); }

void dealloc(PyObject* self) {
  std::destroy_at(&handle_of(self).value);
  auto* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* get_bytes(PyObject* self, void* /*closure*/) { return PyLong_FromSize_t(handle_of(self).value->bytes()); }

PyObject* repr(PyObject* self) {
  return PyUnicode_FromFormat("<tensorferry.rpc.Published, %zu bytes>", handle_of(self).value->bytes());
}

PyObject* reduce(PyObject* /*self*/, PyObject* /*protocol*/) {
  PyErr_SetString(PyExc_TypeError,
                  "the result of rpc.publish() can be sent only in the arguments and results of calls, and not inside "
                  "a pickled value: it cannot be pickled or copied");
  return nullptr;
}

PyTypeObject* make_type() {
  static PyMethodDef methods[] = {{"__reduce_ex__", &reduce, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef properties[] = {
      {"nbytes", &get_bytes, nullptr, "int: the bytes of the block of memory that holds its tensors.", nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static const char doc[] =
      R"(A value that :func:`tensorferry.rpc.publish` encoded, for the arguments or the results of any number of calls.

It arrives at the peer as the value. Its memory lives as long as this handle or any tensor that arrived out of it.

Example::

    table = rpc.publish(torch.ones(1000, 1000))
    assert table.nbytes >= 4_000_000
    assert rpc.rpc_sync("worker1", torch.sum, args=(table,)) == 1e6
)";
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>(doc)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
                                {Py_tp_repr, reinterpret_cast<void*>(&repr)},
                                {Py_tp_methods, methods},
                                {Py_tp_getset, properties},
                                {0, nullptr}};
  static PyType_Spec spec{"tensorferry.rpc.Published", sizeof(PublishedHandle), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

py::object publish(PythonAgent& agent, py::handle value) {
  Message message;
  if (!agent.codec().write_published(value.ptr(), message)) throw py::error_already_set();
  auto made = [&] {
    const GilReleased gil;
    return Published::make(message);
  }();
  auto published = value_or_raise(std::move(made));
  auto* const handle = handle_type->tp_alloc(handle_type, 0);
  if (handle == nullptr) throw py::error_already_set();
  std::construct_at(&handle_of(handle).value, std::move(published));
  return py::reinterpret_steal<py::object>(handle);
}

}  // namespace

bool is_published(PyObject* object) noexcept { return Py_TYPE(object) == handle_type; }
const Published& published_in(PyObject* object) noexcept { return *handle_of(object).value; }

void bind_publish(py::module_& module) {
  handle_type = make_type();
  if (handle_type == nullptr) throw py::error_already_set();
  module.attr("Published") = py::handle(reinterpret_cast<PyObject*>(handle_type));
  py::options options;
  options.disable_function_signatures();  // each docstring begins with its own, whose types are more exact
  module.def("publish", &publish, py::arg("agent"), py::arg("value"),
             R"(publish(agent: Agent, value: typing.Any) -> Published

Implements Agent.publish().)");
  module.def(
      "is_called_by_name", [](py::handle callable) { return !wire_name_of(callable)->by_value; }, py::arg("callable"),
      R"(is_called_by_name(callable: collections.abc.Callable[..., typing.Any]) -> bool

Returns whether calls name the function, instead of carrying a pickle of it.)");
}

}  // namespace tensorferry::python
