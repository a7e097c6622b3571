/// Reads and makes numpy arrays and scalars for the codec, without numpy's headers: through __array_struct__ and
/// numpy's Python functions. Sending never imports numpy; receiving an array does.
///
/// All functions need the GIL.
#pragma once

#include <Python.h>

#include "python/csrc/codec.h"

namespace tensorferry::python {

/// Whether `object` is a numpy.ndarray, of no subclass, whose dtype is plain bytes (no objects, no fields).
bool is_plain_array(PyObject* object);
/// Whether `object` is a numpy scalar, of numpy's own class for a plain dtype.
bool is_plain_scalar(PyObject* object);

struct ArrayView {
  ArrayLayout layout;
  ByteView elements;  // contiguous, in the order that the layout names
  Object holder;      // owns the elements
};
/// Gives the elements of a plain array or scalar: a copy if the array is not contiguous, else its own memory. False
/// with an error set.
bool view_array(PyObject* array, ArrayView& out);

/// Makes an array or scalar with a copy of `elements`. `layout` must have passed validate(). Null with an error set.
Object copy_array(const ArrayLayout& layout, ByteView elements);
/// Makes an array whose elements are the memory of `buffer`, without a copy. Null with an error set.
Object wrap_array(const ArrayLayout& layout, const Buffer& buffer);

/// Makes a bytes-like Python object over the memory of `buffer`, which it keeps. Null with an error set.
Object wrap_buffer(const Buffer& buffer, bool read_only);

}  // namespace tensorferry::python
