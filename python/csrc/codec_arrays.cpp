#include "python/csrc/codec_arrays.h"

#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "python/csrc/codec_types.h"

namespace tensorferry::python {
namespace {

/// The struct in the capsule of __array_struct__ ("The array interface protocol", version 3).
struct ArrayInterface {
  int two;
  int dimensions;
  char kind;
  int item_bytes;
  int flags;
  Py_ssize_t* sizes;
  Py_ssize_t* strides;
  void* data;
  PyObject* description;
};
constexpr int c_contiguous = 0x1;
constexpr int f_contiguous = 0x2;
constexpr int writeable = 0x400;

struct Numpy {
  PyObject* array_type = nullptr;
  PyObject* scalar_type = nullptr;
  PyObject* dtype = nullptr;
  PyObject* empty = nullptr;
};

/// Returns numpy's functions and types; null, without an error set, if numpy is not (wholly) imported. Never freed.
const Numpy* loaded_numpy() {
  static Numpy numpy;
  if (numpy.empty != nullptr) return &numpy;
  auto* const module = PyDict_GetItemString(PyImport_GetModuleDict(), "numpy");
  if (module == nullptr) return nullptr;
  numpy.array_type = PyObject_GetAttrString(module, "ndarray");
  numpy.scalar_type = PyObject_GetAttrString(module, "generic");
  numpy.dtype = PyObject_GetAttrString(module, "dtype");
  if (numpy.array_type != nullptr && numpy.scalar_type != nullptr && numpy.dtype != nullptr) {
    numpy.empty = PyObject_GetAttrString(module, "empty");
  }
  if (numpy.empty == nullptr) PyErr_Clear();  // another thread is importing it
  return numpy.empty != nullptr ? &numpy : nullptr;
}

const Numpy* imported_numpy() {
  if (const auto* numpy = loaded_numpy()) return numpy;
  const Object module(PyImport_ImportModule("numpy"));
  if (!module) return nullptr;
  const auto* numpy = loaded_numpy();
  if (numpy == nullptr) PyErr_SetString(PyExc_ImportError, "numpy is only partly imported");
  return numpy;
}

struct DtypeInfo {
  Object dtype;  // kept, so that no other dtype gets its address
  bool plain = false;
  std::string text;  // dtype.str
  std::uint32_t item_bytes = 0;
  PyObject* scalar = nullptr;  // dtype.type; the dtype keeps it alive
};

bool is_none_attribute(PyObject* object, const char* name) {
  const Object value(PyObject_GetAttrString(object, name));
  return value.get() == Py_None;
}

long number_attribute(PyObject* object, const char* name) {
  const Object value(PyObject_GetAttrString(object, name));
  return value ? PyLong_AsLong(value.get()) : -1;
}

DtypeInfo find_out(PyObject* dtype) {
  constexpr long first_user_type = 256;
  DtypeInfo info;
  info.dtype = borrow(dtype);
  const Object text(PyObject_GetAttrString(dtype, "str"));
  const Object scalar(PyObject_GetAttrString(dtype, "type"));
  const auto item_bytes = number_attribute(dtype, "itemsize");
  const auto type_number = number_attribute(dtype, "num");
  const bool simple = is_none_attribute(dtype, "fields") && is_none_attribute(dtype, "subdtype") &&
                      is_none_attribute(dtype, "metadata");
  if (PyErr_Occurred() != nullptr || !text || !scalar || !PyUnicode_Check(text.get())) {
    PyErr_Clear();
    return info;
  }
  const auto* const characters = PyUnicode_AsUTF8(text.get());
  if (characters == nullptr) {
    PyErr_Clear();
    return info;
  }
  info.text = characters;
  info.item_bytes = static_cast<std::uint32_t>(item_bytes);
  info.scalar = scalar.get();
  // Applies the receiver's check, so that no dtype is sent which the receiver would refuse.
  ArrayLayout single;
  single.dtype = info.text;
  single.item_bytes = info.item_bytes;
  info.plain = simple && type_number >= 0 && type_number < first_user_type && item_bytes > 0 &&
               validate(single, info.item_bytes).ok();
  return info;
}

const DtypeInfo& info_of(PyObject* dtype) {
  constexpr std::size_t most = 512;  // programs use a dozen; bounds the memory if one makes many
  static auto& known = *new std::unordered_map<PyObject*, DtypeInfo>;
  if (const auto found = known.find(dtype); found != known.end()) return found->second;
  auto info = find_out(dtype);
  if (known.size() >= most) known.clear();
  return known.insert_or_assign(dtype, std::move(info)).first->second;
}

/// Returns the description of the array's dtype; null, without an error set, if it is not plain bytes.
const DtypeInfo* plain_info(PyObject* array) {
  const Object dtype(PyObject_GetAttrString(array, "dtype"));
  if (!dtype) {
    PyErr_Clear();
    return nullptr;
  }
  const auto& info = info_of(dtype.get());
  return info.plain ? &info : nullptr;
}

Object interface_capsule(PyObject* array) { return Object(PyObject_GetAttrString(array, "__array_struct__")); }

const ArrayInterface* interface_of(const Object& capsule) {
  return static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.get(), nullptr));
}

/// Returns the bytes that the array's elements take.
std::size_t bytes_of(const ArrayInterface& interface) {
  auto bytes = static_cast<std::size_t>(interface.item_bytes);
  for (int i = 0; i < interface.dimensions; ++i) bytes *= static_cast<std::size_t>(interface.sizes[i]);
  return bytes;
}

Object dtype_from(const ArrayLayout& layout, const Numpy& numpy) {
  constexpr std::size_t most = 512;
  struct Known {
    Object dtype;
    long item_bytes;
  };
  static auto& known = *new std::unordered_map<std::string, Known>;
  const auto found = known.find(layout.dtype);
  Object dtype(found != known.end() ? borrow(found->second.dtype.get())
                                    : Object(PyObject_CallFunction(numpy.dtype, "s", layout.dtype.c_str())));
  if (!dtype) return nullptr;
  const auto item_bytes = found != known.end() ? found->second.item_bytes : number_attribute(dtype.get(), "itemsize");
  if (item_bytes != static_cast<long>(layout.item_bytes)) {
    PyErr_Format(PyExc_ValueError, "a received numpy array has dtype %s and elements of %u bytes", layout.dtype.c_str(),
                 layout.item_bytes);
    return nullptr;
  }
  if (found != known.end()) return dtype;
  if (known.size() >= most) known.clear();
  known.emplace(layout.dtype, Known{borrow(dtype.get()), item_bytes});
  return dtype;
}

Object sizes_of(const ArrayLayout& layout) {
  Object sizes(PyTuple_New(static_cast<Py_ssize_t>(layout.sizes.size())));
  if (!sizes) return nullptr;
  for (std::size_t i = 0; i < layout.sizes.size(); ++i) {
    auto* const size = PyLong_FromLongLong(layout.sizes[i]);
    if (size == nullptr) return nullptr;
    PyTuple_SET_ITEM(sizes.get(), static_cast<Py_ssize_t>(i), size);
  }
  return sizes;
}

const char* order_of(const ArrayLayout& layout) { return (layout.flags & ArrayLayout::fortran) != 0 ? "F" : "C"; }

/// Received bytes as a Python object, which arrays and unpickled objects on that memory hold.
struct ArrayMemory {
  PyObject_HEAD Buffer buffer;
  bool read_only;
};

int get_memory(PyObject* self, Py_buffer* view, int flags) {
  const auto& memory = *reinterpret_cast<ArrayMemory*>(self);
  return PyBuffer_FillInfo(view, self, memory.buffer.data, static_cast<Py_ssize_t>(memory.buffer.bytes),
                           memory.read_only ? 1 : 0, flags);
}

void free_memory(PyObject* self) {
  auto* const type = Py_TYPE(self);
  reinterpret_cast<ArrayMemory*>(self)->buffer.~Buffer();
  PyObject_Free(self);
  Py_DECREF(type);
}

PyTypeObject* memory_type() {
  static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&get_memory)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(&free_memory)},
                                {0, nullptr}};
  static PyType_Spec spec{"tensorferry._C.Memory", sizeof(ArrayMemory), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static auto* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

/// Applies the flags of the layout: makes a scalar, or makes the array read-only.
Object finished(const ArrayLayout& layout, Object array) {
  if (!array) return nullptr;
  if ((layout.flags & ArrayLayout::scalar) != 0) {
    const Object empty(PyTuple_New(0));
    return empty ? Object(PyObject_GetItem(array.get(), empty.get())) : nullptr;
  }
  if ((layout.flags & ArrayLayout::read_only) != 0) {
    const Object flags(PyObject_GetAttrString(array.get(), "flags"));
    if (!flags || PyObject_SetAttrString(flags.get(), "writeable", Py_False) != 0) return nullptr;
  }
  return array;
}

}  // namespace

Object wrap_buffer(const Buffer& buffer, bool read_only) {
  auto* const type = memory_type();
  if (type == nullptr) return nullptr;
  auto* const memory = PyObject_New(ArrayMemory, type);
  if (memory == nullptr) return nullptr;
  new (&memory->buffer) Buffer(buffer);
  memory->read_only = read_only;
  return Object(reinterpret_cast<PyObject*>(memory));
}

bool is_plain_array(PyObject* object) {
  const auto* const numpy = loaded_numpy();
  if (numpy == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(object)) != numpy->array_type) return false;
  return plain_info(object) != nullptr;
}

bool is_plain_scalar(PyObject* object) {
  const auto* const numpy = loaded_numpy();
  auto* const type = Py_TYPE(object);
  if (numpy == nullptr || PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(numpy->scalar_type)) == 0)
    return false;
  const auto* const info = plain_info(object);
  return info != nullptr && info->scalar == reinterpret_cast<PyObject*>(type);
}

bool view_array(PyObject* array, ArrayView& out) {
  const auto* const info = plain_info(array);
  if (info == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "a numpy array changed its dtype while it was being sent");
    return false;
  }
  out.layout.dtype = info->text;
  out.layout.item_bytes = info->item_bytes;
  out.layout.flags = 0;
  out.holder = borrow(array);
  auto capsule = interface_capsule(array);
  if (!capsule) return false;
  const auto* interface = interface_of(capsule);
  if (interface == nullptr) return false;
  const bool read_only = (interface->flags & writeable) == 0;
  if ((interface->flags & (c_contiguous | f_contiguous)) == 0) {
    out.holder.reset(PyObject_CallMethod(array, "copy", "s", "C"));
    if (!out.holder) return false;
    capsule = interface_capsule(out.holder.get());
    if (!capsule || (interface = interface_of(capsule)) == nullptr) return false;
  }
  const bool scalar = reinterpret_cast<PyObject*>(Py_TYPE(array)) != loaded_numpy()->array_type;
  if (scalar) out.layout.flags |= ArrayLayout::scalar;
  if (read_only && !scalar) out.layout.flags |= ArrayLayout::read_only;
  if ((interface->flags & c_contiguous) == 0) out.layout.flags |= ArrayLayout::fortran;
  std::size_t bytes = out.layout.item_bytes;
  out.layout.sizes.clear();
  for (int i = 0; i < interface->dimensions; ++i) {
    out.layout.sizes.push_back(interface->sizes[i]);
    bytes *= static_cast<std::size_t>(interface->sizes[i]);
  }
  out.elements = {static_cast<const std::byte*>(interface->data), bytes};
  if (scalar) out.holder = std::move(capsule);  // keeps the temporary array that numpy made for the scalar
  return true;
}

Object copy_array(const ArrayLayout& layout, ByteView elements) {
  const auto* const numpy = imported_numpy();
  if (numpy == nullptr) return nullptr;
  const auto dtype = dtype_from(layout, *numpy);
  const auto sizes = sizes_of(layout);
  if (!dtype || !sizes) return nullptr;
  Object array(PyObject_CallFunction(numpy->empty, "OOs", sizes.get(), dtype.get(), order_of(layout)));
  if (!array) return nullptr;
  const auto capsule = interface_capsule(array.get());
  if (!capsule) return nullptr;
  const auto* const interface = interface_of(capsule);
  if (interface == nullptr) return nullptr;
  if (bytes_of(*interface) != elements.size()) {  // memory that the message does not fill would hold others' data
    PyErr_Format(PyExc_ValueError, "a received numpy array of dtype %s takes other bytes than it came with",
                 layout.dtype.c_str());
    return nullptr;
  }
  if (!elements.empty()) std::memcpy(interface->data, elements.data(), elements.size());
  return finished(layout, std::move(array));
}

Object wrap_array(const ArrayLayout& layout, const Buffer& buffer) {
  const auto* const numpy = imported_numpy();
  if (numpy == nullptr) return nullptr;
  const auto dtype = dtype_from(layout, *numpy);
  const auto sizes = sizes_of(layout);
  const auto memory = wrap_buffer(buffer, false);
  if (!dtype || !sizes || !memory) return nullptr;
  return finished(layout, Object(PyObject_CallFunction(numpy->array_type, "OOOiOs", sizes.get(), dtype.get(),
                                                       memory.get(), 0, Py_None, order_of(layout))));
}

}  // namespace tensorferry::python
