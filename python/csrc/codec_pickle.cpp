#include "python/csrc/codec_pickle.h"

#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>

#include "python/csrc/codec_arrays.h"
#include "python/csrc/codec_types.h"
#include "python/csrc/errors.h"
#include "python/csrc/interpreter.h"
#include "python/csrc/share.h"
#include "rpc/tensor.h"

// A pickler calls `reduce` for every object that is not of a plain builtin type. For a tensor, `reduce` answers "call
// tensorferry._C._part with this number", and the tensor travels as a part: a value of the codec. (Persistent ids would
// do the same, but cost a call for every int and str.)

namespace tensorferry::python {
namespace {

// ---- Writing

/// The file and callbacks of a pickler. Each pickler has one, bound to the pickle in progress.
struct PickleSink {
  PyObject_HEAD Pickle* pickle;
  const Codec* codec;
};

Object attribute(PyObject* object, const char* name) { return Object(PyObject_GetAttrString(object, name)); }

/// The functions of tensorferry._C with these names, set by bind_codec().
PyObject* part_function = nullptr;
PyObject* subclass_function = nullptr;
PyObject* storage_function = nullptr;

/// Adds a part and returns its number.
Object add_part(Pickle& pickle, PyObject* object) {
  pickle.parts.push_back(borrow(object));
  return Object(PyLong_FromSize_t(pickle.parts.size() - 1));
}

PyObject* not_implemented() { return Py_NewRef(Py_NotImplemented); }

PyObject* reduce_to_part(Pickle& pickle, PyObject* object) {
  const auto number = add_part(pickle, object);
  return number ? Py_BuildValue("O(O)", part_function, number.get()) : nullptr;
}

/// Whether the class `type` inherits the attribute `name` from torch.Tensor or Parameter unchanged.
bool inherits(PyTypeObject* type, const char* name) {
  const auto own = attribute(reinterpret_cast<PyObject*>(type), name);
  for (auto* const base : {THPVariableClass, ParameterClass}) {
    if (own.get() == attribute(base, name).get()) return PyErr_Occurred() == nullptr;
  }
  return false;
}

/// Reduces a tensor with attributes, or of a subclass that leaves pickling and dispatch to torch: to the plain tensor
/// as a part, its class, and its state as torch defines it.
PyObject* reduce_tensor(Pickle& pickle, PyObject* object) {
  auto* const type = Py_TYPE(object);
  const auto& tensor = THPVariable_Unpack(object);
  const bool plain_class = THPVariable_CheckTypeExact(type);
  if (tensor.is_quantized()) return reduce_to_part(pickle, object);  // the writer refuses it and gives the reason
  if (tensor.is_meta() || !tensor.has_storage() || !dtype_of(tensor.scalar_type())) return not_implemented();
  if (!plain_class && (!inherits(type, "__reduce_ex__") || !inherits(type, "__torch_dispatch__"))) {
    PyErr_Clear();
    return not_implemented();
  }
  const auto get_state = attribute_of("torch._utils", "_get_obj_state");
  const auto set_state = attribute_of("torch._utils", "_set_obj_state");
  const Object state(PyObject_CallOneArg(get_state.ptr(), object));
  if (!state) return nullptr;
  const auto number = add_part(pickle, object);
  if (!number) return nullptr;
  if (plain_class) {
    return Py_BuildValue("O(O)OOOO", part_function, number.get(), state.get(), Py_None, Py_None, set_state.ptr());
  }
  auto* const requires_grad = tensor.requires_grad() ? Py_True : Py_False;
  return Py_BuildValue("O(OOO)OOOO", subclass_function, number.get(), type, requires_grad, state.get(), Py_None,
                       Py_None, set_state.ptr());
}

/// Reduces a torch.UntypedStorage to the tensor of its bytes.
PyObject* reduce_storage(Pickle& pickle, PyObject* object) {
  const auto& storage = THPStorage_Unpack(object);
  if (!storage.device().is_cpu() && !storage.device().is_cuda()) return not_implemented();
  const Object tensor(THPVariable_Wrap(bytes_of(storage)));
  if (!tensor) return nullptr;
  const auto number = add_part(pickle, tensor.get());
  return number ? Py_BuildValue("O(O)", storage_function, number.get()) : nullptr;
}

/// Reduces a torch.TypedStorage to its UntypedStorage and its dtype.
PyObject* reduce_typed_storage(PyObject* object) {
  const auto partial = attribute_of("functools", "partial");
  const auto untyped = attribute(object, "_untyped_storage");
  const auto dtype = attribute(object, "dtype");
  if (!untyped || !dtype) return nullptr;
  const Object args(PyTuple_Pack(1, Py_TYPE(object)));
  const Object kwargs(
      Py_BuildValue("{sOsOsO}", "wrap_storage", untyped.get(), "dtype", dtype.get(), "_internal", Py_True));
  if (!args || !kwargs) return nullptr;
  const Object call(PyObject_Call(partial.ptr(), args.get(), kwargs.get()));
  return call ? Py_BuildValue("O()", call.get()) : nullptr;
}

/// Reduces a scripted module to the bytes of torch.jit.save.
PyObject* reduce_script_module(PyObject* object) {
  const auto reduce_module = attribute_of("tensorferry._script_modules", "reduce");
  return PyObject_CallOneArg(reduce_module.ptr(), object);
}

bool is_script_module(PyTypeObject* type) {
  static auto* const base = attribute_of("torch.jit", "ScriptModule").release().ptr();
  return PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(base)) != 0;
}

PyObject* reduce(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  auto& sink = *reinterpret_cast<PickleSink*>(self);
  auto& pickle = *sink.pickle;
  auto* const type = Py_TYPE(object);
  if (PyType_Check(object) || PyFunction_Check(object) || PyCFunction_Check(object)) return not_implemented();
  if (THPVariable_CheckTypeExact(type)) {
    if (kind_of(object, *sink.codec) == ValueKind::tensor) return reduce_to_part(pickle, object);
    return reduce_tensor(pickle, object);
  }
  if (is_shared(object)) return reduce_to_part(pickle, object);
  if (sink.codec->is_reference_type(type)) return reduce_to_part(pickle, object);
  if (is_plain_array(object) || is_plain_scalar(object)) return reduce_to_part(pickle, object);
  if (is_tensor(object)) return reduce_tensor(pickle, object);
  if (THPStorage_CheckTypeExact(type)) return reduce_storage(pickle, object);
  static auto* const typed = attribute_of("torch.storage", "TypedStorage").release().ptr();
  if (reinterpret_cast<PyObject*>(type) == typed) return reduce_typed_storage(object);
  if (is_script_module(type)) return reduce_script_module(object);
  return not_implemented();
  END_HANDLE_TH_ERRORS
}

PyObject* write(PyObject* self, PyObject* bytes) {
  Py_buffer view;
  if (PyObject_GetBuffer(bytes, &view, PyBUF_SIMPLE) != 0) return nullptr;
  Writer(reinterpret_cast<PickleSink*>(self)->pickle->stream)
      .raw({static_cast<const std::byte*>(view.buf), static_cast<std::size_t>(view.len)});
  PyBuffer_Release(&view);
  Py_RETURN_NONE;
}

/// Takes a buffer. False: it stays out of the stream. True: pickle writes it into the stream, or raises if it cannot.
PyObject* take_buffer(PyObject* self, PyObject* buffer) {
  const auto* const view = PyPickleBuffer_GetBuffer(buffer);
  if (view == nullptr) return nullptr;
  if (PyBuffer_IsContiguous(view, 'A') == 0) Py_RETURN_TRUE;
  reinterpret_cast<PickleSink*>(self)->pickle->buffers.push_back(borrow(buffer));
  Py_RETURN_FALSE;
}

PyObject* sink_type() {
  static PyMethodDef methods[] = {{"write", &write, METH_O, nullptr},
                                  {"take_buffer", &take_buffer, METH_O, nullptr},
                                  {"reduce", &reduce, METH_O, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_methods, methods}, {0, nullptr}};
  static PyType_Spec spec{"tensorferry._C.PickleSink", sizeof(PickleSink), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static auto* const type = PyType_FromSpec(&spec);
  return type;
}

/// An idle pickler. Picklers are reused, because making one costs as much as a small pickle. make_pickle() takes a
/// pickler off the list while it runs, because objects that are being pickled may call make_pickle() again. After an
/// error it drops the pickler.
struct Pickler {
  Object sink;
  Object pickler;
  Object dump;
  Object clear_memo;
};

std::vector<Pickler>& idle_picklers() {
  static auto& idle = *new std::vector<Pickler>;
  return idle;
}

/// Makes a subclass of pickle.Pickler (the one in C). Its instances can have attributes, which the base class forbids,
/// and the pickler looks `reducer_override` up in them.
PyObject* pickler_class() {
  static auto* const type = [] {
    const auto base = attribute_of("_pickle", "Pickler");
    return PyObject_CallFunction(reinterpret_cast<PyObject*>(&PyType_Type), "s(O){}", "Pickler", base.ptr());
  }();
  return type;
}

bool new_pickler(Pickler& out) {
  auto* const type = sink_type();
  if (type == nullptr || pickler_class() == nullptr) return false;
  out.sink.reset(reinterpret_cast<PyObject*>(PyObject_New(PickleSink, reinterpret_cast<PyTypeObject*>(type))));
  if (!out.sink) return false;
  const auto callback = attribute(out.sink.get(), "take_buffer");
  const auto reducer = attribute(out.sink.get(), "reduce");
  if (!callback || !reducer) return false;
  constexpr int protocol = 5;
  out.pickler.reset(PyObject_CallFunction(pickler_class(), "OiOO", out.sink.get(), protocol, Py_True, callback.get()));
  if (!out.pickler || PyObject_SetAttrString(out.pickler.get(), "reducer_override", reducer.get()) != 0) return false;
  out.dump = attribute(out.pickler.get(), "dump");
  out.clear_memo = attribute(out.pickler.get(), "clear_memo");
  return out.dump && out.clear_memo;
}

// ---- Loading

/// The parts of the pickle that this thread loads.
thread_local std::span<const Object> parts_of_load;

PyObject* part(PyObject* /*module*/, PyObject* number) {
  const auto index = PyLong_AsSize_t(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (index >= parts_of_load.size()) {
    PyErr_SetString(PyExc_ValueError, "a pickle names a part that its message does not have");
    return nullptr;
  }
  return Py_NewRef(parts_of_load[index].get());
}

PyObject* tensor_part(PyObject* number) {
  auto* const tensor = part(nullptr, number);
  if (tensor == nullptr || is_tensor(tensor)) return tensor;
  Py_DECREF(tensor);
  PyErr_SetString(PyExc_ValueError, "a pickle names a part as a tensor, but the part is not one");
  return nullptr;
}

PyObject* subclass(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "_subclass takes 3 arguments");
    return nullptr;
  }
  const Object tensor(tensor_part(args[0]));
  if (!tensor) return nullptr;
  const auto make = attribute(THPVariableClass, "_make_subclass");
  return make ? PyObject_CallFunctionObjArgs(make.get(), args[1], tensor.get(), args[2], nullptr) : nullptr;
}

PyObject* storage(PyObject* /*module*/, PyObject* number) {
  const Object tensor(tensor_part(number));
  return tensor ? PyObject_CallMethod(tensor.get(), "untyped_storage", nullptr) : nullptr;
}

}  // namespace

bool make_pickle(PyObject* value, const Codec& codec, Pickle& out) {
  Pickler pickler;
  auto& idle = idle_picklers();
  if (!idle.empty()) {
    pickler = std::move(idle.back());
    idle.pop_back();
  } else if (!new_pickler(pickler)) {
    return false;
  }
  auto& sink = *reinterpret_cast<PickleSink*>(pickler.sink.get());
  sink.pickle = &out;
  sink.codec = &codec;
  const Object done(PyObject_CallOneArg(pickler.dump.get(), value));
  if (!done) return false;
  const Object cleared(PyObject_CallNoArgs(pickler.clear_memo.get()));
  if (!cleared) return false;
  idle_picklers().push_back(std::move(pickler));
  return true;
}

Object load_pickle(ByteView stream, std::span<const Object> buffers, std::span<const Object> parts) {
  const Object bytes(PyMemoryView_FromMemory(const_cast<char*>(reinterpret_cast<const char*>(stream.data())),
                                             static_cast<Py_ssize_t>(stream.size()), PyBUF_READ));
  const Object list(PyTuple_New(static_cast<Py_ssize_t>(buffers.size())));
  if (!bytes || !list) return nullptr;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    PyTuple_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), Py_NewRef(buffers[i].get()));
  }
  static auto* const loads = attribute_of("_pickle", "loads").release().ptr();
  static auto* const names = Py_BuildValue("(s)", "buffers");
  PyObject* const args[] = {bytes.get(), list.get()};
  // Loading runs code of the user, which may load other pickles.
  const auto outer = std::exchange(parts_of_load, parts);
  Object value(PyObject_Vectorcall(loads, args, 1, names));
  parts_of_load = outer;
  return value;
}

void bind_codec(py::module_& module) {
  static PyMethodDef methods[] = {
      {"_part", &part, METH_O, "The tensor or reference that a pickle left out, by its number."},
      {"_subclass", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&subclass)), METH_FASTCALL,
       "The tensor by its number, as an instance of a subclass."},
      {"_storage", &storage, METH_O, "The storage of the tensor by its number."},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
  part_function = py::object(module.attr("_part")).release().ptr();
  subclass_function = py::object(module.attr("_subclass")).release().ptr();
  storage_function = py::object(module.attr("_storage")).release().ptr();
}

}  // namespace tensorferry::python
