/// Python objects as messages, and back: arguments, results, exceptions.
///
/// None, bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, torch tensors and
/// parameters, torch.dtype, device, Size, layout and memory_format, numpy arrays and scalars, and references go by the
/// codec of rpc/core/codec.h; a type is told by `type(x) is`, so subclasses do not. So do named tuples, dataclasses and
/// TensorDicts (codec_records.h says which). Where arguments (or a result) hold
/// anything else, all of them go as one pickle (protocol 5) whose tensors, arrays, references and large buffers stay
/// out of it, as values and buffers of their own: whole, so that an object which appears twice stays one object.
///
/// Functions here return false or null with a Python error set, as CPython's do, and need the GIL. A message's buffers
/// own what they are made of; they may be dropped on any thread, with or without the GIL, also after the interpreter's
/// end.
#pragma once

#include <Python.h>

#include <memory>
#include <optional>
#include <vector>

#include "agent/agent.h"
#include "converters/registry.h"
#include "rpc/core/codec.h"
#include "rpc/core/envelope.h"
#include "rpc/core/exception.h"
#include "rpc/tensor.h"

namespace pybind11 {
class module_;
}

namespace tensorferry::python {

class RecordClasses;

/// A new reference to a Python object, or null.
struct Drop {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Object = std::unique_ptr<PyObject, Drop>;

/// The references of one message: what writing and reading them takes that the codec does not know (the receiver, the
/// call). Implemented by the binding of remote references. Both functions need the GIL.
class MessageReferences {
 public:
  /// Fills `record` from an object of the registered type; called once for each message that holds the object.
  virtual bool write(PyObject* object, ReferenceRecord& record) = 0;
  /// A new reference to the object that stands for the record here.
  virtual PyObject* read(const ReferenceRecord& record) = 0;

 protected:
  ~MessageReferences() = default;
};

/// How an agent writes and reads values. Set up before use, then only read. Encoding and decoding may run Python code
/// (__reduce__, __setstate__, imports), which may let the GIL go and may call in here again.
///
/// Where `references` is null, a message with references fails.
class Codec {
 public:
  explicit Codec(std::shared_ptr<const Converters> converters);
  ~Codec();

  /// Objects of exactly `type` (kept alive) travel as references, also inside pickled ones.
  void register_reference_type(PyTypeObject* type);
  /// From now on messages that hold a pickle are refused with PermissionDenied, and none is written (TypeError).
  void refuse_pickle() { pickle_ = false; }

  /// A call with (first, *args, **kwargs).
  struct Invocation {
    PyObject* first = nullptr;   // may be null
    PyObject* args = nullptr;    // a tuple; or a published (tuple, dict or None), with neither `first` nor `kwargs`
    PyObject* kwargs = nullptr;  // a dict with names as keys, or null
    std::optional<Creation> creation;
    std::uint64_t call = 0;  // as RequestHead has it
  };
  bool write_request(const Invocation& invocation, MessageReferences* references, Message& out) const;
  struct Arguments {
    std::optional<Creation> creation;
    std::uint64_t call = 0;
    Object args;    // a tuple, `first` included
    Object kwargs;  // a dict, or null where there are none
  };
  /// Where it fails, what the head says is set all the same, as far as it was read.
  bool read_request(const Received& message, MessageReferences* references, Arguments& out) const;

  /// A value for many messages (rpc/core/published.h): without references.
  bool write_published(PyObject* value, Message& out) const;

  bool write_result(PyObject* value, MessageReferences* references, Message& out) const;
  /// `exception` goes pickled beside its description where it can be; null: only described. Fails for lack of memory
  /// alone.
  bool write_exception(RemoteException described, PyObject* exception, MessageReferences* references,
                       Message& out) const;
  struct Outcome {
    Object value;                              // of a call that returned
    std::optional<RemoteException> described;  // of one that raised
    Object exception;                          // rebuilt as its own type; null where it could not be
    std::vector<WeakStorage> device_storages;  // of the value's tensors on other devices than the CPU
  };
  bool read_reply(const Received& message, MessageReferences* references, Outcome& out) const;

  /// One value inside an envelope of the caller's.
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

/// Functions that pickles of ours call when they are loaded, and the buffers that arrays made from them hold.
void bind_codec(pybind11::module_& module);

/// tensorferry._C._testing: the codec without an agent.
void bind_testing(pybind11::module_& module);

}  // namespace tensorferry::python
