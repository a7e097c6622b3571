#include "python/csrc/codec_types.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <string>

#include "python/csrc/codec_arrays.h"
#include "python/csrc/codec_records.h"
#include "python/csrc/publish.h"
#include "python/csrc/share.h"
#include "rpc/tensor.h"

namespace tensorferry::python {
namespace {

ValueKind kind_of_tensor(PyObject* object) {
  if (has_attributes(object)) return ValueKind::other;
  const auto& tensor = THPVariable_Unpack(object);
  if (tensor.is_meta()) return ValueKind::other;
  // TensorWriter refuses quantised tensors, with a reason. Other dtypes that the codec lacks go to pickle.
  if (!tensor.is_quantized() && !dtype_of(tensor.scalar_type())) return ValueKind::other;
  return ValueKind::tensor;
}

ValueKind kind_of_size(PyObject* size) {
  const auto count = PyTuple_GET_SIZE(size);
  if (count > static_cast<Py_ssize_t>(Dims::max)) return ValueKind::other;
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto* const value = PyTuple_GET_ITEM(size, i);
    if (!PyLong_CheckExact(value)) return ValueKind::other;  // symbolic size
    int overflow = 0;
    PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) return ValueKind::other;
  }
  return ValueKind::size;
}

/// Classifies objects of torch and numpy, objects of this library, and records.
ValueKind kind_of_library_object(PyObject* object, PyTypeObject* type, const Codec& codec) {
  if (THPVariable_CheckTypeExact(type)) return kind_of_tensor(object);
  if (codec.is_reference_type(type)) return ValueKind::reference;
  if (is_shared(object)) return ValueKind::shared;
  if (is_published(object)) return ValueKind::published;
  if (type == &THPDtypeType) return dtype_number(object) ? ValueKind::dtype : ValueKind::other;
  if (type == &THPDeviceType) return ValueKind::device;
  if (type == &THPSizeType) return kind_of_size(object);
  if (type == &THPLayoutType) return layout_number(object) ? ValueKind::layout : ValueKind::other;
  if (type == &THPMemoryFormatType) return memory_format_number(object) ? ValueKind::memory_format : ValueKind::other;
  if (is_plain_array(object)) return ValueKind::array;
  if (is_plain_scalar(object)) return ValueKind::scalar;
  if (const auto record = codec.records().of(type); record && record->fits(object)) return ValueKind::record;
  return ValueKind::other;
}

}  // namespace

ValueKind kind_of(PyObject* object, const Codec& codec) {
  auto* const type = Py_TYPE(object);
  if (type == &PyUnicode_Type) return ValueKind::text;
  if (type == &PyLong_Type) return ValueKind::integer;
  if (type == &PyFloat_Type) return ValueKind::real;
  if (object == Py_None) return ValueKind::none;
  if (type == &PyBool_Type) return ValueKind::boolean;
  if (type == &PyTuple_Type) return ValueKind::tuple;
  if (type == &PyDict_Type) return ValueKind::dict;
  if (type == &PyList_Type) return ValueKind::list;
  if (type == &PyBytes_Type) return ValueKind::bytes;
  if (type == &PyComplex_Type) return ValueKind::complex;
  if (type == &PyByteArray_Type) return ValueKind::bytearray;
  if (type == &PySet_Type) return ValueKind::set;
  if (type == &PyFrozenSet_Type) return ValueKind::frozenset;
  return kind_of_library_object(object, type, codec);
}

bool is_tensor(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

bool has_attributes(PyObject* object) {
  auto** const dict = _PyObject_GetDictPtr(object);
  return dict != nullptr && *dict != nullptr && PyDict_GET_SIZE(*dict) != 0;
}

std::optional<LayoutNumber> layout_number(PyObject* layout) {
  switch (reinterpret_cast<THPLayout*>(layout)->layout) {
    case at::kStrided:
      return LayoutNumber::strided;
    case at::kSparse:
      return LayoutNumber::coo;
    case at::kSparseCsr:
      return LayoutNumber::csr;
    case at::kSparseCsc:
      return LayoutNumber::csc;
    case at::kSparseBsr:
      return LayoutNumber::bsr;
    case at::kSparseBsc:
      return LayoutNumber::bsc;
    case at::kMkldnn:
      return LayoutNumber::mkldnn;
    case at::kJagged:
      return LayoutNumber::jagged;
    default:
      return std::nullopt;
  }
}

Object layout_object(LayoutNumber number) {
  auto layout = at::kStrided;
  switch (number) {
    case LayoutNumber::strided:
      break;
    case LayoutNumber::coo:
      layout = at::kSparse;
      break;
    case LayoutNumber::csr:
      layout = at::kSparseCsr;
      break;
    case LayoutNumber::csc:
      layout = at::kSparseCsc;
      break;
    case LayoutNumber::bsr:
      layout = at::kSparseBsr;
      break;
    case LayoutNumber::bsc:
      layout = at::kSparseBsc;
      break;
    case LayoutNumber::mkldnn:
      layout = at::kMkldnn;
      break;
    case LayoutNumber::jagged:
      layout = at::kJagged;
      break;
  }
  return borrow(reinterpret_cast<PyObject*>(torch::getTHPLayout(layout)));
}

std::optional<MemoryFormatNumber> memory_format_number(PyObject* format) {
  switch (reinterpret_cast<THPMemoryFormat*>(format)->memory_format) {
    case at::MemoryFormat::Contiguous:
      return MemoryFormatNumber::contiguous;
    case at::MemoryFormat::Preserve:
      return MemoryFormatNumber::preserve;
    case at::MemoryFormat::ChannelsLast:
      return MemoryFormatNumber::channels_last;
    case at::MemoryFormat::ChannelsLast3d:
      return MemoryFormatNumber::channels_last_3d;
    default:
      return std::nullopt;
  }
}

Object memory_format_object(MemoryFormatNumber number) {
  auto format = at::MemoryFormat::Contiguous;
  switch (number) {
    case MemoryFormatNumber::contiguous:
      break;
    case MemoryFormatNumber::preserve:
      format = at::MemoryFormat::Preserve;
      break;
    case MemoryFormatNumber::channels_last:
      format = at::MemoryFormat::ChannelsLast;
      break;
    case MemoryFormatNumber::channels_last_3d:
      format = at::MemoryFormat::ChannelsLast3d;
      break;
  }
  return borrow(torch::utils::getTHPMemoryFormat(format));
}

std::optional<DType> dtype_number(PyObject* dtype) { return dtype_of(reinterpret_cast<THPDtype*>(dtype)->scalar_type); }

Object dtype_object(DType dtype) {
  const auto type = scalar_type_of(dtype);
  return type ? borrow(reinterpret_cast<PyObject*>(torch::getTHPDtype(*type))) : nullptr;
}

Object device_object(std::string_view text) {
  try {
    return Object(THPDevice_New(at::Device(std::string(text))));
  } catch (const c10::Error&) {
    return nullptr;
  }
}

Object size_object(std::span<const std::int64_t> sizes) {
  Object tuple(PyTuple_New(static_cast<Py_ssize_t>(sizes.size())));
  if (!tuple) return nullptr;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    auto* const size = PyLong_FromLongLong(sizes[i]);
    if (size == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), size);
  }
  return Object(PyObject_CallOneArg(reinterpret_cast<PyObject*>(&THPSizeType), tuple.get()));
}

}  // namespace tensorferry::python
