/// Classifies Python objects for the codec, and converts torch's constants to the codec's numbers.
#pragma once

#include <Python.h>

#include <optional>

#include "python/csrc/codec.h"

namespace tensorferry::python {

enum class ValueKind : std::uint8_t {
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
  tensor,  // exactly torch.Tensor or torch.nn.Parameter, without attributes set by the user
  dtype,
  device,
  size,
  layout,
  memory_format,
  shared,     // a tensor that tensorferry.share() marked
  array,      // exactly numpy.ndarray, of plain bytes
  scalar,     // a numpy scalar of plain bytes
  reference,  // of the type given to Codec::register_reference_type()
  published,  // a result of rpc.publish()
  record,     // a named tuple, a dataclass, a TensorDict
  other,      // must be pickled
};

/// Returns the kind of `object`, by its exact type. Never fails; runs no Python code of the user. Needs the GIL.
ValueKind kind_of(PyObject* object, const Codec& codec);

/// Whether `object` is a torch.Tensor or an instance of a subclass.
bool is_tensor(PyObject* object);
/// Whether a tensor has attributes that the user set (t.tag = 1).
bool has_attributes(PyObject* object);

// torch's constants as the codec's numbers, and back. nullopt: the codec has no number, so the value is pickled.
std::optional<LayoutNumber> layout_number(PyObject* layout);
std::optional<MemoryFormatNumber> memory_format_number(PyObject* format);
std::optional<DType> dtype_number(PyObject* dtype);
Object layout_object(LayoutNumber number);
Object memory_format_object(MemoryFormatNumber number);
// Null without an error set: this version of torch has no such constant.
Object dtype_object(DType dtype);
Object device_object(std::string_view text);
Object size_object(std::span<const std::int64_t> sizes);

inline Object borrow(PyObject* object) {
  Py_XINCREF(object);
  return Object(object);
}

}  // namespace tensorferry::python
