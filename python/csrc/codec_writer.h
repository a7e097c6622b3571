/// Writes Python objects into one message. Needs the GIL.
#pragma once

#include <Python.h>

#include <array>
#include <optional>

#include "python/csrc/codec_types.h"
#include "rpc/core/identity_map.h"
#include "rpc/tensor.h"

namespace tensorferry::python {

/// Writes the values of one message, in this order:
/// - scan() for each value.
/// - If every scan() returned true: prepare(), then write() for each value.
/// - Else write_pickled() once, for one value that holds them all.
///
/// False with a Python error set is final.
class PythonValueWriter {
 public:
  PythonValueWriter(const Codec& codec, MessageReferences* references, Encoder& out)
      : codec_(&codec), references_(references), out_(&out), tensors_(codec.converters(), out) {}

  /// Whether the codec has a form for everything in `value`. Notes its tensors. Runs no Python code, except that of
  /// tensordict for a TensorDict.
  bool scan(PyObject* value);
  /// Prepares the noted tensors; without the GIL if many bytes are to be copied.
  bool prepare();
  /// Writes one value. `ours` is the number of references to `value` that the caller holds for this call alone.
  bool write(PyObject* value, int ours = 0);
  /// Writes `value` as one pickle. TypeError if the codec refuses pickles.
  bool write_pickled(PyObject* value);

 private:
  bool scan_container(PyObject* value, ValueKind kind);
  bool scan_items(PyObject* value, ValueKind kind);

  bool write_leaf(PyObject* value, ValueKind kind, const void* identity);
  bool write_integer(PyObject* value);
  bool write_text(PyObject* value, const void* identity);
  bool write_bytearray(PyObject* value, const void* identity);
  bool write_size(PyObject* value);
  bool write_tensor(PyObject* value, const void* identity);
  bool write_shared(PyObject* value, const void* identity);
  bool write_array(PyObject* value, const void* identity);
  bool write_reference(PyObject* value, const void* identity);
  bool write_tuple(PyObject* value, const void* identity);
  bool write_list(PyObject* value, const void* identity);
  bool write_dict(PyObject* value, const void* identity);
  bool write_set(PyObject* value, ValueKind kind, const void* identity);
  bool write_published(PyObject* value, const void* identity);
  bool write_record(PyObject* value, const void* identity);
  bool write_part(PyObject* part);

  const Codec* codec_;
  MessageReferences* references_;
  Encoder* out_;
  TensorWriter tensors_;
  IdentityMap scanned_;                    // containers
  std::array<PyObject*, max_depth> open_;  // the containers around the value that is being scanned
  std::size_t depth_ = 0;
};

/// Sets the Python error for a status of the writing side: TypeError if the value cannot be sent (InvalidArgument).
void set_write_error(const Status& status);

}  // namespace tensorferry::python
