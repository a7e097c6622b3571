#include "python/csrc/codec.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "python/csrc/codec_reader.h"
#include "python/csrc/codec_records.h"
#include "python/csrc/codec_writer.h"
#include "python/csrc/errors.h"
#include "python/csrc/publish.h"

namespace tensorferry::python {
namespace {

bool take(Encoder& out, Message& message) {
  if (const auto status = out.status(); !status.ok()) {
    set_write_error(status);
    return false;
  }
  message = out.take();
  return true;
}

bool finish(Decoder& in) {
  const auto status = in.finish();
  if (!status.ok()) set_error(status);
  return status.ok();
}

using Invocation = Codec::Invocation;

std::size_t positional(const Invocation& call) {
  return static_cast<std::size_t>(PyTuple_GET_SIZE(call.args)) + (call.first != nullptr ? 1 : 0);
}
std::size_t keywords(const Invocation& call) {
  return call.kwargs != nullptr ? static_cast<std::size_t>(PyDict_GET_SIZE(call.kwargs)) : 0;
}

bool scan(PythonValueWriter& writer, const Invocation& call) {
  if (call.first != nullptr && !writer.scan(call.first)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call.args); ++i) {
    if (!writer.scan(PyTuple_GET_ITEM(call.args, i))) return false;
  }
  if (call.kwargs == nullptr) return true;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(call.kwargs, &at, &name, &value) != 0;) {
    if (!writer.scan(value)) return false;
  }
  return true;
}

bool write_keywords(PythonValueWriter& writer, Encoder& out, PyObject* kwargs) {
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &value) != 0;) {
    Py_ssize_t bytes = 0;
    const auto* const text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &bytes) : nullptr;
    if (text == nullptr) {
      if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_TypeError, "keywords must be strings");
      return false;
    }
    out.raw_text({text, static_cast<std::size_t>(bytes)});
    if (!writer.write(value)) return false;
  }
  return true;
}

bool write_each(PythonValueWriter& writer, Encoder& out, const Invocation& call) {
  if (call.first != nullptr && !writer.write(call.first)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call.args); ++i) {
    if (!writer.write(PyTuple_GET_ITEM(call.args, i))) return false;
  }
  begin_keywords(out, keywords(call));
  return keywords(call) == 0 || write_keywords(writer, out, call.kwargs);
}

/// Returns the tuple ((first, *args), kwargs or None).
Object packed(const Invocation& call) {
  Object args = borrow(call.args);
  if (call.first != nullptr) {
    args.reset(PyTuple_New(PyTuple_GET_SIZE(call.args) + 1));
    if (!args) return nullptr;
    PyTuple_SET_ITEM(args.get(), 0, Py_NewRef(call.first));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call.args); ++i) {
      PyTuple_SET_ITEM(args.get(), i + 1, Py_NewRef(PyTuple_GET_ITEM(call.args, i)));
    }
  }
  return Object(PyTuple_Pack(2, args.get(), call.kwargs != nullptr ? call.kwargs : Py_None));
}

bool unpack(const Object& value, Codec::Arguments& out) {
  const bool fits =
      PyTuple_CheckExact(value.get()) && PyTuple_GET_SIZE(value.get()) == 2 &&
      PyTuple_CheckExact(PyTuple_GET_ITEM(value.get(), 0)) &&
      (PyTuple_GET_ITEM(value.get(), 1) == Py_None || PyDict_CheckExact(PyTuple_GET_ITEM(value.get(), 1)));
  if (!fits) {
    set_error(Status(Code::protocol_error, "the arguments of a request are not a tuple and a dict"));
    return false;
  }
  out.args = borrow(PyTuple_GET_ITEM(value.get(), 0));
  auto* const kwargs = PyTuple_GET_ITEM(value.get(), 1);
  if (kwargs != Py_None) out.kwargs = borrow(kwargs);
  return true;
}

bool read_each(PythonValueReader& reader, Decoder& in, std::size_t positional, Codec::Arguments& out) {
  out.args.reset(PyTuple_New(static_cast<Py_ssize_t>(positional)));
  if (!out.args) return false;
  for (std::size_t i = 0; i < positional; ++i) {
    auto value = reader.read();
    if (!value) return false;
    PyTuple_SET_ITEM(out.args.get(), static_cast<Py_ssize_t>(i), value.release());
  }
  const auto keywords = read_keywords(in);
  if (keywords == 0) return true;
  out.kwargs.reset(PyDict_New());
  for (std::size_t i = 0; i < keywords; ++i) {
    const auto text = in.raw_text();
    if (in.failed()) break;  // finish() reports the error
    const Object name(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
    if (!name) return false;
    const auto value = reader.read();
    if (!value || !out.kwargs || PyDict_SetItem(out.kwargs.get(), name.get(), value.get()) != 0) return false;
  }
  return true;
}

}  // namespace

Codec::Codec(std::shared_ptr<const Converters> converters)
    : converters_(std::move(converters)), records_(std::make_unique<RecordClasses>()) {}
Codec::~Codec() = default;

void Codec::register_reference_type(PyTypeObject* type) { reference_type_ = borrow(reinterpret_cast<PyObject*>(type)); }

bool Codec::write_value(PyObject* value, MessageReferences* references, Encoder& out) const {
  return guarded([&] {
    PythonValueWriter writer(*this, references, out);
    if (!writer.scan(value)) return writer.write_pickled(value);
    return writer.prepare() && writer.write(value);
  });
}

Object Codec::read_value(Decoder& in, MessageReferences* references) const {
  Object value;
  guarded([&] {
    value = PythonValueReader(*this, references, in).read();
    return value != nullptr;
  });
  return value;
}

bool Codec::write_published(PyObject* value, Message& out) const {
  return guarded([&] {
    Encoder encoder;
    return write_value(value, nullptr, encoder) && take(encoder, out);
  });
}

bool Codec::write_request(const Invocation& call, MessageReferences* references, Message& out) const {
  return guarded([&] {
    Encoder encoder;
    if (is_published(call.args)) {
      if (call.first != nullptr || call.kwargs != nullptr) {
        PyErr_SetString(PyExc_TypeError,
                        "published arguments must be the only arguments, and the function must be called by name");
        return false;
      }
      begin_packed_request(encoder, call.creation, call.call, call.timed);
      published_in(call.args).write(encoder);
      return take(encoder, out);
    }
    PythonValueWriter writer(*this, references, encoder);
    if (scan(writer, call)) {
      begin_request(encoder, positional(call), call.creation, call.call, call.timed);
      return writer.prepare() && write_each(writer, encoder, call) && take(encoder, out);
    }
    begin_packed_request(encoder, call.creation, call.call, call.timed);
    const auto whole = packed(call);
    return whole && writer.write_pickled(whole.get()) && take(encoder, out);
  });
}

bool Codec::read_request(const Received& message, MessageReferences* references, Arguments& out) const {
  return guarded([&] {
    Decoder in(message.payload, message.buffers);
    const auto head = tensorferry::read_request(in);
    out.creation = head.creation;
    out.call = head.call;
    out.timed = head.timed;
    PythonValueReader reader(*this, references, in);
    if (!head.packed) return read_each(reader, in, head.positional, out) && finish(in);
    const auto whole = reader.read();
    return whole && unpack(whole, out) && finish(in);
  });
}

bool Codec::write_result(PyObject* value, MessageReferences* references, Message& out) const {
  return guarded([&] {
    Encoder encoder;
    begin_reply(encoder, ReplyKind::value);
    return write_value(value, references, encoder) && take(encoder, out);
  });
}

bool Codec::write_exception(RemoteException described, PyObject* exception, MessageReferences* references,
                            Message& out) const {
  // Peers that are trusted with less than all need not know where the program lies, nor its lines.
  if (!pickle_) described.traceback = described.qualname + ": " + described.text;
  const auto attempt = [&](bool rebuildable) {
    return guarded([&] {
      Encoder encoder;
      begin_reply(encoder, ReplyKind::exception);
      described.rebuildable = rebuildable;
      tensorferry::write_exception(encoder, described);
      if (rebuildable && !PythonValueWriter(*this, references, encoder).write_pickled(exception)) return false;
      return take(encoder, out);
    });
  };
  if (exception != nullptr && pickle_) {
    if (attempt(true)) return true;
    PyErr_Clear();  // it cannot be pickled: send the description alone
  }
  return attempt(false);
}

bool Codec::read_reply(const Received& message, MessageReferences* references, DecodedReply& out) const {
  return guarded([&] {
    Decoder in(message.payload, message.buffers);
    PythonValueReader reader(*this, references, in);
    if (tensorferry::read_reply(in) == ReplyKind::value) {
      out.value = reader.read();
      out.device_storages = reader.take_device_storages();
      return out.value && finish(in);
    }
    out.described = read_exception(in);
    if (in.failed() || !out.described->rebuildable) return finish(in);
    out.exception = reader.read();
    if (out.exception && !PyExceptionInstance_Check(out.exception.get())) out.exception.reset();
    PyErr_Clear();  // if it cannot be rebuilt here, the description is enough
    return true;
  });
}

}  // namespace tensorferry::python
