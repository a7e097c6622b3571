/// Encodes Python objects into messages and decodes them: arguments, results, exceptions.
///
/// The codec of rpc/core/codec.h has a form for these types, compared by `type(x) is`, so not for their subclasses:
/// - None, bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset;
/// - torch tensors and parameters, torch.dtype, device, Size, layout and memory_format;
/// - numpy arrays and scalars;
/// - references;
/// - named tuples, dataclasses and TensorDicts (codec_records.h says which).
///
/// If the arguments (or a result) hold anything else, all of them become one pickle (protocol 5). Tensors, arrays,
/// references and large buffers stay out of the pickle, as values and buffers of their own. The pickle holds the
/// arguments as a whole, so that an object which appears twice stays one object.
///
/// Functions here return false or null with a Python error set, as CPython's do, and need the GIL. The buffers of a
/// message own the objects that they point into. They may be dropped on any thread, with or without the GIL, also after
/// the interpreter's end.
#pragma once

#include <Python.h>

#include <memory>
#include <optional>
#include <vector>

#include "agent/agent.h"
#include "converters/registry.h"
#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"
#include "rpc/core/envelope.h"
#include "rpc/core/exception.h"
#include "rpc/tensor.h"

namespace pybind11 {
class module_;
}

namespace tensorferry::python {

class RecordClasses;

/// An owned reference to a Python object, or null.
struct DropReference {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Object = std::unique_ptr<PyObject, DropReference>;

/// Writes and reads the references of one message, with the data that the codec does not know: the receiver and the
/// call. Implemented by the binding of remote references. Both functions need the GIL.
class MessageReferences {
 public:
  /// Fills `record` from an object of the registered type. Called once for each message that holds the object.
  virtual bool write(PyObject* object, ReferenceRecord& record) = 0;
  /// Returns a new reference to the local object for the record.
  virtual PyObject* read(const ReferenceRecord& record) = 0;

 protected:
  ~MessageReferences() = default;
};

/// Encodes and decodes the values of one agent. Set up before use, then only read. Encoding and decoding may run Python
/// code (__reduce__, __setstate__, imports), which may release the GIL and may call the codec again.
///
/// If `references` is null, messages with references fail.
class Codec {
 public:
  explicit Codec(std::shared_ptr<const Converters> converters);
  ~Codec();

  /// Makes objects of exactly `type` travel as references, also inside pickles. Keeps `type` alive.
  void register_reference_type(PyTypeObject* type);
  /// Refuses pickles from now on: reading a message with one fails with PermissionDenied, writing one with TypeError.
  void refuse_pickle() { pickle_ = false; }

  /// A call with the arguments (first, *args, **kwargs).
  struct Invocation {
    PyObject* first = nullptr;   // may be null
    PyObject* args = nullptr;    // a tuple; or a published (tuple, dict or None), with neither `first` nor `kwargs`
    PyObject* kwargs = nullptr;  // a dict with names as keys, or null
    std::optional<Creation> creation;
    std::uint64_t call = 0;  // as in RequestHead
    bool timed = false;      // as in RequestHead
  };
  bool write_request(const Invocation& invocation, MessageReferences* references, Message& out) const;
  struct Arguments {
    std::optional<Creation> creation;
    std::uint64_t call = 0;
    bool timed = false;
    Object args;    // a tuple, `first` included
    Object kwargs;  // a dict, or null if there are none
  };
  /// Reads a request. On failure, sets the fields of the head (`creation`, `call`, `timed`) as far as they were read.
  bool read_request(const Received& message, MessageReferences* references, Arguments& out) const;

  /// Encodes a value for many messages (rpc/core/published.h). The value holds no references and no published values.
  bool write_published(PyObject* value, Message& out) const;

  bool write_result(PyObject* value, MessageReferences* references, Message& out) const;
  /// Writes an exception: its description, and the pickled exception itself if it can be pickled. `exception` may be
  /// null. Fails only if memory runs out.
  bool write_exception(RemoteException described, PyObject* exception, MessageReferences* references,
                       Message& out) const;
  struct DecodedReply {
    Object value;                              // of a call that returned
    std::optional<RemoteException> described;  // of one that raised
    Object exception;                          // rebuilt as its own type; null if that failed
    std::vector<WeakStorage> device_storages;  // of the value's tensors that are not on the CPU
  };
  bool read_reply(const Received& message, MessageReferences* references, DecodedReply& out) const;

  /// Writes and reads one value, inside an envelope that the caller writes.
  bool write_value(PyObject* value, MessageReferences* references, Encoder& out) const;
  Object read_value(Decoder& in, MessageReferences* references) const;

  /// Whether objects of exactly `type` travel as references.
  [[nodiscard]] bool is_reference_type(PyTypeObject* type) const {
    return reference_type_.get() == reinterpret_cast<PyObject*>(type);
  }
  [[nodiscard]] bool takes_pickle() const { return pickle_; }
  [[nodiscard]] RecordClasses& records() const { return *records_; }
  [[nodiscard]] const Converters& converters() const { return *converters_; }

 private:
  std::shared_ptr<const Converters> converters_;
  Object reference_type_;
  std::unique_ptr<RecordClasses> records_;
  bool pickle_ = true;
};

/// Binds the functions that our pickles call when they are loaded.
void bind_codec(pybind11::module_& module);

/// Binds tensorferry._C._testing: the codec without an agent.
void bind_testing(pybind11::module_& module);

}  // namespace tensorferry::python
