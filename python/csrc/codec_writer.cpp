#include "python/csrc/codec_writer.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "python/csrc/codec_arrays.h"
#include "python/csrc/codec_pickle.h"
#include "python/csrc/codec_records.h"
#include "python/csrc/errors.h"
#include "python/csrc/interpreter.h"
#include "python/csrc/publish.h"
#include "python/csrc/share.h"

namespace tensorferry::python {
namespace {

/// Deeper values are pickled. The bound is below the codec's own, because a sparse tensor adds a level that scan() does
/// not count.
constexpr std::size_t scanned_depth = max_depth - 8;
/// Smaller copies end before another thread would have taken the GIL.
constexpr std::size_t worth_releasing_gil = 256 * 1024;

/// Returns the identity by which Encoder recognises an object that occurs again. Null if only one container (and the
/// writer, `ours` times) holds a reference, so that the object cannot occur again.
const void* identity_of(PyObject* object, int ours = 0) { return Py_REFCNT(object) > 1 + ours ? object : nullptr; }

Owner keep(PyObject* object) { return share_with_any_thread(borrow(object)); }

ByteView view_of_bytes(PyObject* bytes) {
  return {reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(bytes)),
          static_cast<std::size_t>(PyBytes_GET_SIZE(bytes))};
}

bool changed() {
  PyErr_SetString(PyExc_RuntimeError, "a value changed while it was being sent");
  return false;
}

}  // namespace

void set_write_error(const Status& status) {
  if (status.code() != Code::invalid_argument) return set_error(status);
  const auto what = status.what();
  const Object text(PyUnicode_FromStringAndSize(what.data(), static_cast<Py_ssize_t>(what.size())));
  if (text) PyErr_SetObject(PyExc_TypeError, text.get());
}

// ---- Scanning

bool PythonValueWriter::scan(PyObject* value) {
  const auto kind = kind_of(value, *codec_);
  switch (kind) {
    case ValueKind::other:
      return false;
    case ValueKind::tuple:
    case ValueKind::list:
    case ValueKind::dict:
    case ValueKind::set:
    case ValueKind::frozenset:
    case ValueKind::record:
      return scan_container(value, kind);
    case ValueKind::tensor:
      tensors_.note(THPVariable_Unpack(value));
      return true;
    default:
      return true;
  }
}

bool PythonValueWriter::scan_container(PyObject* value, ValueKind kind) {
  if (Py_REFCNT(value) > 1) {
    if (scanned_.find(value)) {
      if (kind == ValueKind::list || kind == ValueKind::dict) return true;
      // Such a container that holds itself must be pickled.
      for (std::size_t i = 0; i < depth_; ++i) {
        if (open_[i] == value) return false;
      }
      return true;
    }
    scanned_.insert(value, 0);
  }
  if (depth_ == scanned_depth) return false;
  open_[depth_++] = value;
  const bool native = scan_items(value, kind);
  --depth_;
  return native;
}

bool PythonValueWriter::scan_items(PyObject* value, ValueKind kind) {
  if (kind == ValueKind::tuple || kind == ValueKind::list) {
    auto** const items = PySequence_Fast_ITEMS(value);
    const auto count = PySequence_Fast_GET_SIZE(value);
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!scan(items[i])) return false;
    }
    return true;
  }
  if (kind == ValueKind::dict) {
    PyObject* key = nullptr;
    PyObject* item = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item) != 0;) {
      if (!scan(key) || !scan(item)) return false;
    }
    return true;
  }
  if (kind == ValueKind::record) {
    std::string fields;
    std::vector<Object> items;
    if (!codec_->records().of(Py_TYPE(value))->to_parts(value, fields, items)) return false;
    return std::all_of(items.begin(), items.end(), [this](const auto& item) { return scan(item.get()); });
  }
  const Object iterator(PyObject_GetIter(value));
  while (iterator) {
    const Object item(PyIter_Next(iterator.get()));
    if (!item) break;
    if (!scan(item.get())) return false;
  }
  PyErr_Clear();  // write() meets the same error again, and reports it
  return true;
}

bool PythonValueWriter::prepare() {
  std::optional<GilReleased> released;
  if (tensors_.copying() > worth_releasing_gil) released.emplace();
  tensors_.prepare();
  return true;
}

// ---- Writing

bool PythonValueWriter::write(PyObject* value, int ours) {
  const auto kind = kind_of(value, *codec_);
  const void* identity = identity_of(value, ours);
  switch (kind) {
    // These kinds have no back-references, except long text and bytes, which write_leaf() looks up.
    case ValueKind::none:
    case ValueKind::boolean:
    case ValueKind::integer:
    case ValueKind::real:
    case ValueKind::complex:
    case ValueKind::dtype:
    case ValueKind::device:
    case ValueKind::size:
    case ValueKind::layout:
    case ValueKind::memory_format:
    case ValueKind::text:
    case ValueKind::bytes:
      return write_leaf(value, kind, identity);
    default:
      break;
  }
  if (identity != nullptr && out_->again(identity)) return true;
  switch (kind) {
    case ValueKind::tuple:
      return write_tuple(value, identity);
    case ValueKind::list:
      return write_list(value, identity);
    case ValueKind::dict:
      return write_dict(value, identity);
    case ValueKind::set:
    case ValueKind::frozenset:
      return write_set(value, kind, identity);
    case ValueKind::tensor:
      return write_tensor(value, identity);
    case ValueKind::shared:
      return write_shared(value, identity);
    case ValueKind::bytearray:
      return write_bytearray(value, identity);
    case ValueKind::array:
    case ValueKind::scalar:
      return write_array(value, identity);
    case ValueKind::reference:
      return write_reference(value, identity);
    case ValueKind::published:
      return write_published(value, identity);
    case ValueKind::record:
      return write_record(value, identity);
    default:
      return changed();
  }
}

bool PythonValueWriter::write_leaf(PyObject* value, ValueKind kind, const void* identity) {
  switch (kind) {
    case ValueKind::none:
      out_->none();
      return true;
    case ValueKind::boolean:
      out_->boolean(value == Py_True);
      return true;
    case ValueKind::integer:
      return write_integer(value);
    case ValueKind::real:
      out_->real(PyFloat_AS_DOUBLE(value));
      return true;
    case ValueKind::complex: {
      const auto number = PyComplex_AsCComplex(value);
      out_->complex(number.real, number.imag);
      return true;
    }
    case ValueKind::text:
      return write_text(value, identity);
    case ValueKind::bytes: {
      const auto bytes = view_of_bytes(value);
      if (bytes.size() > inline_limit && identity != nullptr && out_->again(identity)) return true;
      out_->bytes(
          bytes, [value] { return keep(value); }, identity);
      return true;
    }
    case ValueKind::dtype:
      out_->dtype(*dtype_number(value));
      return true;
    case ValueKind::device:
      out_->device(reinterpret_cast<THPDevice*>(value)->device.str());
      return true;
    case ValueKind::size:
      return write_size(value);
    case ValueKind::layout:
      out_->layout(*layout_number(value));
      return true;
    default:
      out_->memory_format(*memory_format_number(value));
      return true;
  }
}

bool PythonValueWriter::write_integer(PyObject* value) {
  int overflow = 0;
  const auto number = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow == 0) [[likely]] {
    out_->integer(number);
    return true;
  }
  const Object magnitude(PyNumber_Absolute(value));
  const Object bits(magnitude ? PyObject_CallMethod(magnitude.get(), "bit_length", nullptr) : nullptr);
  if (!bits) return false;
  const auto bytes = (PyLong_AsSsize_t(bits.get()) + 7) / 8;
  const Object raw(PyObject_CallMethod(magnitude.get(), "to_bytes", "ns", bytes, "little"));
  if (!raw) return false;
  out_->big_integer(overflow < 0, view_of_bytes(raw.get()));
  return true;
}

bool PythonValueWriter::write_text(PyObject* value, const void* identity) {
  Py_ssize_t bytes = 0;
  if (const auto* const text = PyUnicode_AsUTF8AndSize(value, &bytes)) {
    const std::string_view view(text, static_cast<std::size_t>(bytes));
    if (view.size() <= inline_limit) {
      out_->text(view);
    } else if (identity == nullptr || !out_->again(identity)) {
      out_->text(
          view, [value] { return keep(value); }, identity);
    }
    return true;
  }
  if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError) == 0) return false;
  PyErr_Clear();  // lone surrogates
  if (identity != nullptr && out_->again(identity)) return true;
  const Object encoded(PyUnicode_AsEncodedString(value, "utf-8", "surrogatepass"));
  if (!encoded) return false;
  out_->text(
      text_of(view_of_bytes(encoded.get())), [&encoded] { return keep(encoded.get()); }, identity);
  return true;
}

bool PythonValueWriter::write_bytearray(PyObject* value, const void* identity) {
  // Copies even large ones: while a buffer of a bytearray is exported, the bytearray cannot be resized, and its owner
  // may go on appending to it.
  const ByteView bytes(reinterpret_cast<const std::byte*>(PyByteArray_AS_STRING(value)),
                       static_cast<std::size_t>(PyByteArray_GET_SIZE(value)));
  if (bytes.size() <= inline_limit) {
    out_->bytearray(
        bytes, [] { return Owner(); }, identity);
    return true;
  }
  const auto copy = std::make_shared<Bytes>(bytes.begin(), bytes.end());
  out_->bytearray(
      *copy, [&copy] { return copy; }, identity);
  return true;
}

bool PythonValueWriter::write_size(PyObject* value) {
  Dims sizes;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
    sizes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(value, i)));
  out_->size(sizes);
  return true;
}

bool PythonValueWriter::write_tensor(PyObject* value, const void* identity) {
  const bool parameter = reinterpret_cast<PyObject*>(Py_TYPE(value)) == ParameterClass;
  const auto status = tensors_.write(THPVariable_Unpack(value), parameter, identity);
  if (!status.ok()) set_write_error(status);
  return status.ok();
}

bool PythonValueWriter::write_shared(PyObject* value, const void* identity) {
  auto* const tensor = tensor_of_shared(value);
  const bool parameter = reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == ParameterClass;
  const auto status = tensors_.write_shared(THPVariable_Unpack(tensor), parameter, identity);
  if (!status.ok()) set_write_error(status);  // it was resized after share()
  return status.ok();
}

bool PythonValueWriter::write_array(PyObject* value, const void* identity) {
  ArrayView array;
  if (!view_array(value, array)) return false;
  out_->array(
      array.layout, array.elements, [&array] { return keep(array.holder.get()); }, identity);
  return true;
}

bool PythonValueWriter::write_reference(PyObject* value, const void* identity) {
  if (references_ == nullptr) {
    PyErr_SetString(PyExc_TypeError, "a remote reference cannot be sent in this message");
    return false;
  }
  ReferenceRecord record;
  if (!references_->write(value, record)) return false;
  out_->reference(record, identity);
  return true;
}

// Writing a leaf may run Python code (references, numpy's copies), which may change the containers. So each item is
// held while it is written, and the items are counted.

bool PythonValueWriter::write_tuple(PyObject* value, const void* identity) {
  const auto count = PyTuple_GET_SIZE(value);
  if (!out_->begin_tuple(static_cast<std::size_t>(count), identity)) return true;  // the Encoder holds the error
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!write(PyTuple_GET_ITEM(value, i))) return false;
  }
  out_->end();
  return true;
}

bool PythonValueWriter::write_list(PyObject* value, const void* identity) {
  const auto count = PyList_GET_SIZE(value);
  if (!out_->begin_list(static_cast<std::size_t>(count), identity)) return true;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i >= PyList_GET_SIZE(value)) return changed();
    const auto item = borrow(PyList_GET_ITEM(value, i));
    if (!write(item.get(), 1)) return false;
  }
  if (PyList_GET_SIZE(value) != count) return changed();
  out_->end();
  return true;
}

bool PythonValueWriter::write_dict(PyObject* value, const void* identity) {
  const auto count = PyDict_GET_SIZE(value);
  if (!out_->begin_dict(static_cast<std::size_t>(count), identity)) return true;
  Py_ssize_t written = 0;
  PyObject* key = nullptr;
  PyObject* item = nullptr;
  for (Py_ssize_t at = 0; written < count && PyDict_Next(value, &at, &key, &item) != 0; ++written) {
    const auto held_key = borrow(key);
    const auto held_item = borrow(item);
    if (!write(key, 1) || !write(item, 1)) return false;
  }
  if (written != count || PyDict_GET_SIZE(value) != count) return changed();
  out_->end();
  return true;
}

bool PythonValueWriter::write_set(PyObject* value, ValueKind kind, const void* identity) {
  const auto count = PySet_GET_SIZE(value);
  const auto values = static_cast<std::size_t>(count);
  if (!(kind == ValueKind::set ? out_->begin_set(values, identity) : out_->begin_frozenset(values, identity)))
    return true;
  const Object iterator(PyObject_GetIter(value));
  if (!iterator) return false;
  Py_ssize_t written = 0;
  for (; written < count; ++written) {
    const Object item(PyIter_Next(iterator.get()));
    if (!item) break;
    if (!write(item.get(), 1)) return false;
  }
  if (PyErr_Occurred() != nullptr) return false;
  if (written != count || PySet_GET_SIZE(value) != count) return changed();
  out_->end();
  return true;
}

bool PythonValueWriter::write_published(PyObject* value, const void* identity) {
  if (references_ == nullptr) {
    PyErr_SetString(PyExc_TypeError, "the result of rpc.publish() cannot be sent in this message, or published again");
    return false;
  }
  published_in(value).write(*out_, identity);
  return true;
}

bool PythonValueWriter::write_record(PyObject* value, const void* identity) {
  const auto record = codec_->records().of(Py_TYPE(value));
  std::string fields;
  std::vector<Object> items;
  if (!record->to_parts(value, fields, items)) return changed();
  if (!out_->begin_record(record->kind(), record->name(), 0, items.size() + 1, identity)) return true;
  out_->text(fields);
  for (const auto& item : items) {
    if (!write(item.get(), 1)) return false;
  }
  out_->end();
  return true;
}

// ---- Pickled

bool PythonValueWriter::write_part(PyObject* part) {
  // For an instance of a subclass, the plain tensor arrives, so a back-reference to that part would be wrong.
  const bool subclass = is_tensor(part) && !THPVariable_CheckExact(part);
  const auto* const identity = subclass ? nullptr : identity_of(part, 1);
  if (identity != nullptr && out_->again(identity)) return true;
  if (is_tensor(part)) return write_tensor(part, identity);
  if (is_shared(part)) return write_shared(part, identity);
  if (codec_->is_reference_type(Py_TYPE(part))) return write_reference(part, identity);
  return write_array(part, identity);
}

bool PythonValueWriter::write_pickled(PyObject* value) {
  if (!codec_->takes_pickle()) {
    PyErr_Format(PyExc_TypeError,
                 "this agent sends no pickles, and the codec cannot encode a part of a value of type %.200s",
                 Py_TYPE(value)->tp_name);
    return false;
  }
  Pickle pickle;
  if (!make_pickle(value, *codec_, pickle)) return false;

  tensors_ = TensorWriter(codec_->converters(), *out_);  // drops the tensors that scan() noted: only the parts are sent
  for (const auto& part : pickle.parts) {
    if (is_tensor(part.get())) tensors_.note(THPVariable_Unpack(part.get()));
  }
  if (!prepare()) return false;

  std::vector<Encoder::PickleBuffer> buffers;
  buffers.reserve(pickle.buffers.size());
  for (const auto& buffer : pickle.buffers) {
    const auto* const view = PyPickleBuffer_GetBuffer(buffer.get());
    if (view == nullptr) return false;
    const ByteView bytes(static_cast<const std::byte*>(view->buf), static_cast<std::size_t>(view->len));
    buffers.push_back({bytes, view->readonly != 0, bytes.size() > inline_limit ? keep(buffer.get()) : nullptr});
  }
  const auto stream = std::make_shared<Bytes>(std::move(pickle.stream));
  // A tensor (with attributes, or of a subclass) is a part of its own pickle, and its address identifies that part.
  const auto* const identity = is_tensor(value) ? nullptr : identity_of(value);
  if (!out_->begin_pickled(*stream, stream, buffers, pickle.parts.size(), identity)) return true;
  for (const auto& part : pickle.parts) {
    if (!write_part(part.get())) return false;
  }
  out_->end();
  return true;
}

}  // namespace tensorferry::python
