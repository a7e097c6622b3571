/// Writes and loads pickles (protocol 5) that leave tensors, arrays, references and large buffers out of the stream.
/// All functions need the GIL.
#pragma once

#include <Python.h>

#include <functional>
#include <span>
#include <vector>

#include "python/csrc/codec.h"

namespace tensorferry::python {

/// A pickle: the stream, and the objects that were left out of it.
struct Pickle {
  Bytes stream;
  std::vector<Object> buffers;  // pickle.PickleBuffer objects, all contiguous
  std::vector<Object> parts;    // tensors (of any class), arrays, references; the stream names them by number
};

/// Pickles `value`. False with the error set that pickle or an object's __reduce__ raised. Runs Python code.
bool make_pickle(PyObject* value, const Codec& codec, Pickle& out);

/// Loads a pickle. `buffers` are bytes-like objects; `parts` are the objects that the stream names by number. Null with
/// an error set. Runs Python code of the pickle's choice.
Object load_pickle(ByteView stream, std::span<const Object> buffers, std::span<const Object> parts);

}  // namespace tensorferry::python
