/// Pickle protocol 5 with tensors, arrays, references and large buffers left out of the stream.
#pragma once

#include <Python.h>

#include <functional>
#include <span>
#include <vector>

#include "python/csrc/codec.h"

namespace tensorferry::python {

/// What a pickle is made of.
struct Pickle {
  Bytes stream;
  std::vector<Object> buffers;  // pickle.PickleBuffer objects, all contiguous
  std::vector<Object> parts;    // tensors (of any class), arrays, references: what the stream calls for by number
};

/// False with the error set that pickle or an object's __reduce__ raised.
bool make_pickle(PyObject* value, const Codec& codec, Pickle& out);

/// `buffers`: bytes-like objects. Null with an error set.
Object load_pickle(ByteView stream, std::span<const Object> buffers, std::span<const Object> parts);

}  // namespace tensorferry::python
