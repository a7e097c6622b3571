/// numpy arrays and scalars for the codec, without numpy's headers: through __array_struct__ and what numpy offers to
/// Python. numpy is never imported for the sender's sake.
#pragma once

#include <Python.h>

#include "python/csrc/codec.h"

namespace tensorferry::python {

/// numpy.ndarray itself, of a dtype that is plain bytes (no objects, no fields).
bool is_plain_array(PyObject* object);
/// A numpy scalar (of numpy's own classes) of such a dtype.
bool is_plain_scalar(PyObject* object);

struct ArrayView {
  ArrayLayout layout;
  ByteView elements;  // contiguous as the layout says
  Object holder;      // of the elements
};
/// The elements of a plain array or scalar; a copy of those of an array that is not contiguous.
bool view_array(PyObject* array, ArrayView& out);

/// An array (or scalar) with a copy of `elements`, of a layout that validate() has passed. Null with an error set.
Object copy_array(const ArrayLayout& layout, ByteView elements);
/// An array of the elements in `buffer`, without a copy.
Object wrap_array(const ArrayLayout& layout, const Buffer& buffer);

/// A bytes-like Python object that is `buffer`.
Object wrap_buffer(const Buffer& buffer, bool read_only);

}  // namespace tensorferry::python
