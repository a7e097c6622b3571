#include "python/csrc/codec_reader.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string_view>
#include <utility>

#include "python/csrc/codec_arrays.h"
#include "python/csrc/codec_pickle.h"
#include "python/csrc/codec_records.h"
#include "python/csrc/errors.h"
#include "python/csrc/interpreter.h"
#include "rpc/core/published.h"

namespace tensorferry::python {
namespace {

const char* characters(ByteView bytes) { return reinterpret_cast<const char*>(bytes.data()); }
Py_ssize_t length(ByteView bytes) { return static_cast<Py_ssize_t>(bytes.size()); }

/// Copies `from` into a new bytes or bytearray; `data` returns its memory. Releases the GIL for large copies.
template <class Data>
Object copied(Object object, ByteView from, Data data) {
  constexpr std::size_t worth_releasing_gil = 1 << 20;
  if (!object || from.empty()) return object;
  auto* const to = data(object.get());
  std::optional<GilReleased> released;
  if (from.size() >= worth_releasing_gil) released.emplace();
  std::memcpy(to, from.data(), from.size());
  return object;
}

Object bytes_object(ByteView from) {
  return copied(Object(PyBytes_FromStringAndSize(nullptr, length(from))), from, &PyBytes_AsString);
}
Object bytearray_object(ByteView from) {
  return copied(Object(PyByteArray_FromStringAndSize(nullptr, length(from))), from, &PyByteArray_AsString);
}

/// Tells torch's Python side that this process uses the tensor's type of device. A process whose first tensor of a GPU
/// is received has not called torch.cuda, which until then holds back the seeds that it is given, and empties no cache.
/// Returns false with a Python error if torch refuses, as after a fork.
bool initialised_for(const at::Tensor& tensor) {
  return guarded([&] {
    torch::utils::maybe_initialize_device(tensor.options());
    return true;
  });
}

/// Caches the strings of short dict keys, because the same keys come with message after message. Each place of the hash
/// table keeps the latest key. The GIL guards it.
class Keys final {
 public:
  static constexpr std::size_t longest = 64;

  /// Returns the string for the bytes of a key. Null without an error set: the key is not ASCII, so not cached.
  Object of(ByteView bytes) {
    auto& kept = kept_[std::hash<std::string_view>()(text_of(bytes)) % kept_.size()];
    if (kept && PyUnicode_GET_LENGTH(kept.get()) == length(bytes) &&
        std::memcmp(PyUnicode_1BYTE_DATA(kept.get()), bytes.data(), bytes.size()) == 0) {
      return borrow(kept.get());
    }
    if (std::any_of(bytes.begin(), bytes.end(), [](std::byte each) { return each >= std::byte{0x80}; })) return nullptr;
    Object key(PyUnicode_FromStringAndSize(characters(bytes), length(bytes)));
    if (key) kept = borrow(key.get());
    return key;
  }

 private:
  std::array<Object, 1024> kept_;  // by hash; ASCII only
};

Keys& keys() {
  static auto& all = *new Keys;  // never destroyed: the interpreter may have ended by then
  return all;
}

/// Counts the keys of one container by hash. Python compares each key with those of its hash that came before, and a
/// peer can choose integers, floats and tuples of one hash: n of them would hold the GIL for n * n comparisons. Python
/// draws a secret for the hashes of texts and bytes, so these are not counted.
class HashCounts final {
 public:
  static constexpr std::uint8_t most = 32;  // keys of one hash; by chance there are two or three

  /// `keys`: how many the container has.
  explicit HashCounts(std::size_t keys) {
    constexpr std::size_t few = 64;  // whose comparisons cost nothing
    if (keys <= few) return;
    bits_ = static_cast<unsigned>(std::bit_width(2 * keys));
    counts_.resize(std::size_t{1} << bits_);
  }

  /// Counts a key. Returns false if there are too many of its hash; or with a Python error if it has no hash.
  bool add(PyObject* key) {
    if (counts_.empty() || PyUnicode_CheckExact(key) != 0 || PyBytes_CheckExact(key) != 0) return true;
    const auto hash = PyObject_Hash(key);
    if (hash == -1 && PyErr_Occurred() != nullptr) return false;
    // No sender knows the multiplier, so none can make keys of different hashes meet here.
    static const auto multiplier = std::uint64_t{std::random_device()()} << 32 | std::random_device()() | 1U;
    auto& count = counts_[(static_cast<std::uint64_t>(hash) * multiplier) >> (64 - bits_)];
    return ++count <= most;
  }

 private:
  unsigned bits_ = 0;
  std::vector<std::uint8_t> counts_;
};

constexpr const char* too_many_of_one_hash = "holds a dict or set with too many keys of one hash";

}  // namespace

std::nullptr_t PythonValueReader::failed() {
  set_error(in_->status());
  return nullptr;
}

std::nullptr_t PythonValueReader::failed(const char* why) {
  in_->fail(why);
  return failed();
}

Object PythonValueReader::numbered(std::uint32_t number, Object object) {
  if (object && number != Decoder::unnumbered) {
    if (objects_.size() <= number) objects_.resize(in_->numbers());
    objects_[number] = borrow(object.get());
  }
  return object;
}

Object PythonValueReader::numbered(std::uint32_t number, Object object, std::uint64_t before) {
  if (object && number != Decoder::unnumbered) {
    if (within_.size() <= number) within_.resize(in_->numbers());
    within_[number] = values_ - before;
  }
  return numbered(number, std::move(object));
}

Object PythonValueReader::known(Object constant, const char* else_why) {
  if (constant || PyErr_Occurred() != nullptr) return constant;
  return failed(else_why);
}

Object PythonValueReader::read(Tag tag) {
  ++values_;
  switch (tag) {
    case Tag::none:
      return borrow(Py_None);
    case Tag::false_:
      return borrow(Py_False);
    case Tag::true_:
      return borrow(Py_True);
    case Tag::integer:
      return Object(PyLong_FromLongLong(in_->integer()));
    case Tag::big_integer:
      return read_big_integer();
    case Tag::real:
      return Object(PyFloat_FromDouble(in_->real()));
    case Tag::complex:
      return Object(PyComplex_FromDoubles(in_->real(), in_->imaginary()));
    case Tag::text:
      return read_text();
    case Tag::bytes:
      return numbered(in_->number(), bytes_object(in_->view()));
    case Tag::bytearray:
      return numbered(in_->number(), bytearray_object(in_->view()));
    case Tag::tuple:
      return read_tuple();
    case Tag::list:
      return read_list();
    case Tag::dict:
      return read_dict();
    case Tag::set:
    case Tag::frozenset:
      return read_set(tag);
    case Tag::tensor:
    case Tag::sparse:
      return read_tensor(tag);
    case Tag::array:
      return read_array();
    case Tag::pickled:
      return read_pickled();
    case Tag::reference:
      if (references_ == nullptr) return failed("holds a reference where none is allowed");
      paused_.reset();
      return numbered(in_->number(), Object(references_->read(in_->reference())));
    case Tag::dtype:
    case Tag::device:
    case Tag::size:
    case Tag::layout:
    case Tag::memory_format:
      return read_of_torch(tag);
    case Tag::again:
      return read_again();
    case Tag::published:
      return read_published();
    case Tag::record:
      return read_record();
    case Tag::invalid:
      break;
  }
  return failed();
}

Object PythonValueReader::read_of_torch(Tag tag) {
  if (tag == Tag::dtype) {
    return known(dtype_object(in_->dtype()), "names a dtype that this version of torch does not have");
  }
  if (tag == Tag::device) {
    return known(device_object(in_->text()), "names a device that this version of torch does not know");
  }
  if (tag == Tag::size) return size_object(in_->size());
  return tag == Tag::layout ? layout_object(in_->layout()) : memory_format_object(in_->memory_format());
}

Object PythonValueReader::read_big_integer() {
  const bool negative = in_->negative();
  const Object magnitude(PyBytes_FromStringAndSize(characters(in_->view()), length(in_->view())));
  if (!magnitude) return nullptr;
  Object number(
      PyObject_CallMethod(reinterpret_cast<PyObject*>(&PyLong_Type), "from_bytes", "Os", magnitude.get(), "little"));
  return number && negative ? Object(PyNumber_Negative(number.get())) : std::move(number);
}

Object PythonValueReader::read_key() {
  const auto tag = in_->next();
  if (tag == Tag::text && !in_->far() && !in_->view().empty() && in_->view().size() <= Keys::longest) {
    if (auto key = keys().of(in_->view()); key || PyErr_Occurred() != nullptr) return key;
  }
  ++keys_;
  auto key = read(tag);
  --keys_;
  return key;
}

Object PythonValueReader::read_text() {
  const auto number = in_->number();
  auto bytes = in_->view();
  // Python checks the bytes, then copies them: in memory that the sender still writes, they could change in between.
  const Object own(in_->far() ? bytes_object(bytes) : nullptr);
  if (in_->far()) {
    if (!own) return nullptr;
    bytes = {reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(own.get())), bytes.size()};
  }
  Object text(PyUnicode_DecodeUTF8(characters(bytes), length(bytes), "surrogatepass"));
  if (!text && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError) != 0) {
    PyErr_Clear();
    return failed("holds text that is not UTF-8");
  }
  return numbered(number, std::move(text));
}

/// Returns how many keys of a container are counted by hash: none if senders may run code here anyway.
std::size_t PythonValueReader::counted_keys(std::size_t keys) const { return codec_->takes_pickle() ? 0 : keys; }

Object PythonValueReader::read_tuple() {
  const auto number = in_->number();
  const auto before = values_;
  const auto count = static_cast<Py_ssize_t>(in_->count());
  Object tuple(PyTuple_New(count));
  if (!tuple) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto item = read();
    if (!item) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), i, item.release());
  }
  in_->leave();
  return numbered(number, std::move(tuple), before);
}

Object PythonValueReader::read_list() {
  const auto count = static_cast<Py_ssize_t>(in_->count());
  Object list(PyList_New(count));
  if (!list) return nullptr;
  // Reserves memory for all items, but the length never exceeds the items that have been read: a pickle inside the list
  // may hold the list, and so see it before it is complete.
  Py_SET_SIZE(list.get(), 0);
  list = numbered(in_->number(), std::move(list));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const auto item = read();
    if (!item || PyList_Append(list.get(), item.get()) != 0) return nullptr;
  }
  in_->leave();
  return list;
}

Object PythonValueReader::read_dict() {
  const auto count = in_->count();
  auto dict = numbered(in_->number(), Object(PyDict_New()));
  if (!dict) return nullptr;
  HashCounts hashes(counted_keys(count));
  for (std::size_t i = 0; i < count; ++i) {
    const auto key = read_key();
    if (!key) return nullptr;
    if (!hashes.add(key.get())) return PyErr_Occurred() != nullptr ? nullptr : failed(too_many_of_one_hash);
    const auto item = read();
    if (!item || PyDict_SetItem(dict.get(), key.get(), item.get()) != 0) return nullptr;
  }
  in_->leave();
  return dict;
}

Object PythonValueReader::read_set(Tag tag) {
  const auto number = in_->number();
  const auto before = values_;
  const auto count = in_->count();
  Object set(tag == Tag::set ? PySet_New(nullptr) : PyFrozenSet_New(nullptr));
  if (!set) return nullptr;
  HashCounts hashes(counted_keys(count));
  for (std::size_t i = 0; i < count; ++i) {
    ++keys_;
    const auto item = read();
    --keys_;
    if (!item) return nullptr;
    if (!hashes.add(item.get())) return PyErr_Occurred() != nullptr ? nullptr : failed(too_many_of_one_hash);
    if (PySet_Add(set.get(), item.get()) != 0) return nullptr;
  }
  in_->leave();
  return numbered(number, std::move(set), before);
}

Object PythonValueReader::read_tensor(Tag tag) {
  const auto number = in_->number();
  const bool sparse = tag == Tag::sparse;
  const auto flags = sparse ? in_->sparse().flags : in_->tensor().flags;
  const bool parameter = (flags & (sparse ? int{SparseLayout::parameter} : int{TensorLayout::parameter})) != 0;
  auto tensor = tensors_.read(*in_, tag);
  if (!tensor.ok()) {
    set_error(tensor.status());
    return nullptr;
  }
  if (!initialised_for(*tensor)) return nullptr;
  auto* const type = parameter ? ParameterClass : THPVariableClass;
  return numbered(number, Object(THPVariable_Wrap(*tensor, reinterpret_cast<PyTypeObject*>(type))));
}

Object PythonValueReader::read_array() {
  const auto far = in_->far();
  auto array = far ? wrap_array(in_->array(), in_->buffers()[*far]) : copy_array(in_->array(), in_->view());
  return numbered(in_->number(), std::move(array));
}

Object PythonValueReader::read_pickled() {
  if (!codec_->takes_pickle()) {
    set_error(Status(Code::permission_denied, "the message holds a pickle, and this agent reads none"));
    return nullptr;
  }
  paused_.reset();
  const auto number = in_->number();
  const auto stream = in_->view();
  std::vector<Object> buffers;
  for (const auto& buffer : in_->pickle_buffers()) {
    if (buffer.far) {
      buffers.push_back(wrap_buffer(in_->buffers()[*buffer.far], buffer.read_only));
    } else {
      buffers.push_back(buffer.read_only ? bytes_object(buffer.bytes) : bytearray_object(buffer.bytes));
    }
    if (!buffers.back()) return nullptr;
  }
  std::vector<Object> parts;
  for (auto count = in_->count(); count != 0; --count) {
    parts.push_back(read());
    if (!parts.back()) return nullptr;
  }
  in_->leave();
  return numbered(number, load_pickle(stream, buffers, parts));
}

Object PythonValueReader::read_published() {
  if (published_) return failed("holds a published value inside another one");
  const auto number = in_->number();
  const auto buffers = published_buffers(*in_);
  Decoder inside(in_->view(), buffers);
  PythonValueReader reader(*codec_, inside);
  auto value = reader.read();
  if (!value) return nullptr;
  if (const auto status = inside.finish(); !status.ok()) {
    set_error(status);
    return nullptr;
  }
  return numbered(number, std::move(value));
}

Object PythonValueReader::read_record() {
  const auto number = in_->number();
  const auto before = values_;
  const auto count = in_->count();
  if (in_->schema() != 0 || count == 0) return failed("holds a record that this agent cannot read");
  paused_.reset();
  // Finds the class before reading the values: a record among the values overwrites the Decoder's record name, and
  // reading them may run code of the user.
  const auto found = codec_->records().find(in_->record_kind(), in_->record_name(), codec_->takes_pickle());
  if (!found.type) return nullptr;
  if (const auto tag = in_->next(); tag != Tag::text)
    return tag == Tag::invalid ? failed() : failed("holds a record without its fields");
  const auto fields = in_->text();
  std::vector<Object> values;
  values.reserve(count - 1);
  for (std::size_t i = 1; i < count; ++i) {
    values.push_back(read());
    if (!values.back()) return nullptr;
  }
  in_->leave();
  return numbered(number, found.known->from_parts(reinterpret_cast<PyTypeObject*>(found.type.get()), fields, values),
                  before);
}

Object PythonValueReader::read_again() {
  const auto number = in_->referred();
  if (number >= objects_.size() || !objects_[number]) return failed("refers to a value that is not complete");
  constexpr std::uint64_t most_hashed_again = std::uint64_t{1} << 24;
  constexpr std::uint64_t countless = std::uint64_t{1} << 62;  // back-references in back-references grow without end
  const auto within = number < within_.size() ? within_[number] : 0;
  values_ = std::min(values_ + within, countless);
  if (keys_ != 0 && !codec_->takes_pickle() &&
      (hashed_again_ = std::min(hashed_again_ + within, countless)) > most_hashed_again)
    return failed("holds keys that are long tuples, again and again");
  return borrow(objects_[number].get());
}

}  // namespace tensorferry::python
