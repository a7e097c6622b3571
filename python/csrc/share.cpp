#include "python/csrc/share.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "python/csrc/codec_types.h"
#include "python/csrc/errors.h"
#include "rpc/sharing.h"

namespace tensorferry::python {
namespace {

struct SharedTensorObject {
  PyObject_HEAD PyObject* tensor;
};

PyTypeObject* shared_type = nullptr;

PyObject*& tensor_in(PyObject* self) { return reinterpret_cast<SharedTensorObject*>(self)->tensor; }

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(tensor_in(self));
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Py_CLEAR(tensor_in(self));
  auto* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* get_tensor(PyObject* self, void* /*closure*/) { return Py_NewRef(tensor_in(self)); }

PyObject* repr(PyObject* self) { return PyUnicode_FromFormat("tensorferry.share(%R)", tensor_in(self)); }

PyObject* get_attribute(PyObject* self, PyObject* name) {
  auto* const found = PyObject_GenericGetAttr(self, name);
  if (found == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError) != 0) {
    PyErr_Format(PyExc_AttributeError,
                 "tensorferry.share() returns a marker, not a tensor: it has no '%U'; the tensor is its .tensor", name);
  }
  return found;
}

PyObject* reduce(PyObject* /*self*/, PyObject* /*protocol*/) {
  PyErr_SetString(PyExc_TypeError,
                  "the result of tensorferry.share() can only be an argument or a result of a call: it cannot be "
                  "pickled or copied (its .tensor can)");
  return nullptr;
}

PyObject* share(PyObject* /*module*/, PyObject* tensor) {
  HANDLE_TH_ERRORS
  if (!THPVariable_CheckExact(tensor)) {
    PyErr_Format(PyExc_TypeError, "share() takes a torch.Tensor or Parameter itself, not %.200s",
                 Py_TYPE(tensor)->tp_name);
    return nullptr;
  }
  if (const auto bytes = shared_bytes(THPVariable_Unpack(tensor)); !bytes.ok()) {
    PyErr_SetString(PyExc_ValueError, std::string(bytes.status().what()).c_str());
    return nullptr;
  }
  auto* const marked = shared_type->tp_alloc(shared_type, 0);
  if (marked != nullptr) tensor_in(marked) = Py_NewRef(tensor);
  return marked;
  END_HANDLE_TH_ERRORS
}

constexpr const char* share_doc = R"doc(share(tensor: torch.Tensor) -> Shared

Marks a tensor to be handed over without a copy, among the arguments of a call or in the result of a handler.

The peer gets an ordinary tensor on the same memory. Each side sees what the other writes. Calls alone order these
writes; nothing makes them atomic. Without ``share``, a call copies the same tensor. The received tensor stays valid
after the call, after either agent has left, and after the process that made it has died. Handing the same memory to
the same peer again costs about as much as an empty call, at any size. A call of an agent to itself hands over
the memory itself.

Args:
    tensor: a result of :func:`tensorferry.empty`, or a view of one (slices, transposes, other shapes, also with gaps).
        The peer gets the view's dtype, sizes and strides, but not the tensor that it is a view of.

Returns:
    A marker, accepted anywhere in arguments and results; its ``tensor`` is the tensor. The marker is not a tensor and
    cannot be pickled.

Raises:
    ValueError: the memory is not from ``tensorferry.empty()`` of this process, or is not on the CPU.
    TypeError: ``tensor`` is not a torch.Tensor or Parameter itself (a subclass, for example).

The call raises :class:`tensorferry.errors.ChannelUnavailable` if the peer cannot map the memory: on another host, as
another user, or if options forbid it. ``explain()`` says whether the channel ``shm`` is usable.

Example::

    board = tensorferry.empty(1024)
    rpc.rpc_sync("worker1", torch.Tensor.fill_, args=(tensorferry.share(board), 3.0))
    assert board[0] == 3
)doc";

PyTypeObject* make_type() {
  static PyMethodDef methods[] = {{"__reduce_ex__", &reduce, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef properties[] = {{"tensor", &get_tensor, nullptr, "torch.Tensor: the marked tensor.", nullptr},
                                     {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static const char doc[] = R"(A tensor marked by :func:`tensorferry.share`, for the arguments or the result of a call.

Example::

    marked = tensorferry.share(tensorferry.empty(8))
    assert marked.tensor.shape == (8,)
)";
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>(doc)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
                                {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                                {Py_tp_repr, reinterpret_cast<void*>(&repr)},
                                {Py_tp_getattro, reinterpret_cast<void*>(&get_attribute)},
                                {Py_tp_methods, methods},
                                {Py_tp_getset, properties},
                                {0, nullptr}};
  static PyType_Spec spec{"tensorferry.Shared", sizeof(SharedTensorObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

py::object empty(const std::vector<std::int64_t>& sizes, py::handle dtype) {
  if (!THPDtype_Check(dtype.ptr())) throw py::type_error("dtype must be a torch.dtype");
  const auto number = dtype_number(dtype.ptr());
  const auto type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  if (!number) throw py::value_error("a tensor of dtype " + py::repr(dtype).cast<std::string>() + " cannot be sent");
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(value_or_raise(empty_to_share(sizes, type))));
}

}  // namespace

bool is_shared(PyObject* object) noexcept { return Py_TYPE(object) == shared_type; }
PyObject* tensor_of_shared(PyObject* shared) noexcept { return tensor_in(shared); }

void bind_share(py::module_& module) {
  shared_type = make_type();
  if (shared_type == nullptr) throw py::error_already_set();
  module.attr("Shared") = py::handle(reinterpret_cast<PyObject*>(shared_type));
  static PyMethodDef methods[] = {{"share", &share, METH_O, share_doc}, {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
  py::options options;
  options.disable_function_signatures();  // the docstring begins with its own, whose types are more exact
  module.def("empty", &empty, py::arg("sizes"), py::arg("dtype"),
             R"(empty(sizes: collections.abc.Sequence[int], dtype: torch.dtype) -> torch.Tensor

Implements tensorferry.empty().)");
}

}  // namespace tensorferry::python
