/// What a Python object is to the codec.
#pragma once

#include <Python.h>

#include <optional>

#include "python/csrc/codec.h"

namespace tensorferry::python {

enum class Kind : std::uint8_t {
  none,
  boolean,
  integer,
  real,
  complex,
  text,
  bytes,
  bytearray,
  tuple,
  list,
  dict,
  set,
  frozenset,
  tensor,  // torch.Tensor or torch.nn.Parameter themselves, without attributes of the user's
  dtype,
  device,
  size,
  layout,
  memory_format,
  shared,     // a tensor that tensorferry.share() marked
  array,      // numpy.ndarray itself, of plain bytes
  scalar,     // a numpy scalar of plain bytes
  reference,  // a type that the codec was told of
  published,  // what rpc.publish() returned
  record,     // a named tuple, a dataclass, a TensorDict
  other,      // for pickle
};

/// By exact type. Never fails, never runs Python code of the user's.
Kind kind_of(PyObject* object, const Codec& codec);

/// Whether `object` is a torch.Tensor, of whatever class.
bool is_tensor(PyObject* object);
/// Whether it has attributes that the user set (t.tag = 1).
bool has_attributes(PyObject* object);

// torch's constants by the codec's numbers. nullopt: one that only pickle can take.
std::optional<LayoutNumber> layout_number(PyObject* layout);
std::optional<MemoryFormatNumber> memory_format_number(PyObject* format);
std::optional<DType> dtype_number(PyObject* dtype);
Object layout_object(LayoutNumber number);
Object memory_format_object(MemoryFormatNumber number);
// Null without an error set: this torch has none such.
Object dtype_object(DType dtype);
Object device_object(std::string_view text);
Object size_object(std::span<const std::int64_t> sizes);

inline Object borrow(PyObject* object) {
  Py_XINCREF(object);
  return Object(object);
}

}  // namespace tensorferry::python
