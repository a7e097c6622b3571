#include "tensorferry/values.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "rpc/cpp/reading.h"
#include "tensorferry/errors.h"
#include "tensorferry/object.h"

namespace tensorferry {
namespace {

void check_begun(bool begun, const Encoder& out) {
  if (!begun) detail::check(out.status());
}

/// Returns whether the tensor must be copied because of gaps between its elements. A tensor whose elements lie densely
/// in any order, or overlap, is sent from its own memory.
bool has_gaps(const Tensor& tensor, std::size_t extent) { return extent > tensor.size(); }

/// Returns the number of elements from the first to the last in memory, gaps included. Throws InvalidArgument on
/// overflow.
std::size_t extent_of(const Tensor& tensor) {
  if (tensor.size() == 0) return 0;
  std::size_t last = 0;
  for (std::size_t i = 0; i < tensor.shape().size(); ++i) {
    std::size_t reach = 0;
    const auto steps = static_cast<std::size_t>(tensor.shape()[i] - 1);
    if (__builtin_mul_overflow(steps, static_cast<std::size_t>(tensor.strides()[i]), &reach) ||
        __builtin_add_overflow(last, reach, &last) || last > PTRDIFF_MAX / 16) {
      throw InvalidArgument("a " + tensor.text() + " has strides that reach beyond all memory");
    }
  }
  return last + 1;
}

void write_tensor(Encoder& out, const Tensor& tensor) {
  const auto extent = extent_of(tensor);
  if (has_gaps(tensor, extent)) return write_tensor(out, tensor.clone());
  TensorLayout layout;
  layout.dtype = tensor.dtype();
  layout.device = tensor.device();
  layout.sizes = Dims(tensor.shape());
  layout.strides = Dims(tensor.strides());
  if (tensor.size() == 0) static_cast<void>(layout.set_contiguous());
  Buffer buffer{tensor.device(), static_cast<std::byte*>(tensor.raw()), extent * size_of(tensor.dtype()), nullptr,
                tensor.owner()};
  const auto index = out.add_buffer(std::move(buffer), {tensor.device(), true});
  out.tensor(layout, index);
}

Tensor tensor_of(const Decoder& in, const Received& message) {
  const auto& layout = in.tensor();
  const auto& buffer = message.buffers[in.buffer()];
  if ((layout.flags & (TensorLayout::conjugate | TensorLayout::negative)) != 0) {
    throw InvalidArgument("a lazily conjugated or negated tensor cannot be read here: send tensor.resolve_conj()");
  }
  // The Decoder has checked that the layout lies inside the buffer.
  auto* data = buffer.data == nullptr
                   ? nullptr
                   : buffer.data + static_cast<std::size_t>(layout.storage_offset) * size_of(layout.dtype);
  return Tensor::from_memory(data, {layout.sizes.begin(), layout.sizes.end()}, layout.dtype, buffer.owner,
                             {layout.strides.begin(), layout.strides.end()}, buffer.device);
}

struct NumpyType {
  std::string_view text;  // numpy's dtype.str without the byte order
  DType dtype;
};
constexpr NumpyType numpy_types[] = {
    {"b1", DType::boolean},   {"u1", DType::uint8},       {"u2", DType::uint16},  {"u4", DType::uint32},
    {"u8", DType::uint64},    {"i1", DType::int8},        {"i2", DType::int16},   {"i4", DType::int32},
    {"i8", DType::int64},     {"f2", DType::float16},     {"f4", DType::float32}, {"f8", DType::float64},
    {"c8", DType::complex64}, {"c16", DType::complex128},
};

/// Returns a tensor of a numpy array; nullopt if DType lacks its dtype, or if it is big-endian.
std::optional<Tensor> tensor_of_array(const Decoder& in, const Received& message) {
  const auto& array = in.array();
  const std::string_view text = array.dtype;
  if (text.empty() || (text.front() != '<' && text.front() != '|')) return std::nullopt;
  const auto* const found = std::find_if(std::begin(numpy_types), std::end(numpy_types),
                                         [&](const auto& type) { return type.text == text.substr(1); });
  if (found == std::end(numpy_types) || size_of(found->dtype) != array.item_bytes) return std::nullopt;
  const Tensor::Shape shape(array.sizes.begin(), array.sizes.end());
  const auto bytes = in.view();
  Tensor out = in.far() ? Tensor::from_memory(message.buffers[*in.far()].data, shape, found->dtype,
                                              message.buffers[*in.far()].owner)
                        : Tensor::empty(shape, found->dtype);
  if (!in.far() && !bytes.empty()) std::memcpy(out.raw(), bytes.data(), bytes.size());
  if ((array.flags & ArrayLayout::fortran) == 0) return out;
  Tensor::Shape strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(shape[i], 1);
  }
  return Tensor::from_memory(out.raw(), shape, found->dtype, out.owner(), std::move(strides));
}

}  // namespace

// ---- writing

void ValueWriter::none() { out_->none(); }
void ValueWriter::boolean(bool value) { out_->boolean(value); }
void ValueWriter::integer(std::int64_t value) { out_->integer(value); }
void ValueWriter::unsigned_integer(std::uint64_t value) {
  if (value <= static_cast<std::uint64_t>(INT64_MAX)) return out_->integer(static_cast<std::int64_t>(value));
  out_->big_integer(false, std::as_bytes(std::span(&value, 1)));
}
void ValueWriter::real(double value) { out_->real(value); }
void ValueWriter::complex(std::complex<double> value) { out_->complex(value.real(), value.imag()); }
void ValueWriter::text(std::string_view value) {
  if (value.size() <= inline_limit) return out_->text(value);
  auto copy = std::make_shared<std::string>(value);
  out_->text(*copy, [&] { return copy; });
}
void ValueWriter::bytes(std::span<const std::byte> value) {
  if (value.size() <= inline_limit) {
    return out_->bytes(value, [] { return Owner(); });
  }
  auto copy = std::make_shared<Bytes>(value.begin(), value.end());
  out_->bytes(*copy, [&] { return copy; });
}
void ValueWriter::tensor(const Tensor& value) {
  write_tensor(*out_, value);
  detail::check(out_->status());
}
void ValueWriter::object(const Object& value) {
  if (!value) throw InvalidArgument("an Object that holds nothing cannot be sent");
  if (marshaller_ == nullptr) throw InvalidArgument("a reference cannot be sent in this place");
  if (marshaller_->keeps()) {
    marshaller_->keep(value);
    return out_->none();
  }
  out_->reference(detail::value_or_throw(marshaller_->add(*value.reference())));
}
void ValueWriter::begin_tuple(std::size_t values) { check_begun(out_->begin_tuple(values), *out_); }
void ValueWriter::begin_list(std::size_t values) { check_begun(out_->begin_list(values), *out_); }
void ValueWriter::begin_dict(std::size_t pairs) { check_begun(out_->begin_dict(pairs), *out_); }
void ValueWriter::end() { out_->end(); }

// ---- reading

bool ValueReader::boolean() {
  const auto tag = in_->peek();
  if (tag != Tag::true_ && tag != Tag::false_) mismatch("bool");
  in_->take();
  return tag == Tag::true_;
}

std::int64_t ValueReader::integer() {
  if (in_->peek() != Tag::integer) mismatch("int");
  return in_->take().integer();
}

std::uint64_t ValueReader::unsigned_integer() {
  if (in_->peek() == Tag::integer) {
    const auto value = in_->take().integer();
    if (value < 0) mismatch("int of 0 or more");
    return static_cast<std::uint64_t>(value);
  }
  if (in_->peek() != Tag::big_integer) mismatch("int");
  const auto& in = in_->take();
  std::uint64_t value = 0;
  if (in.negative() || in.view().size() > sizeof value) mismatch("int of 64 bits");
  if (!in.view().empty()) std::memcpy(&value, in.view().data(), in.view().size());
  return value;
}

double ValueReader::real() {
  if (in_->peek() == Tag::integer) return static_cast<double>(in_->take().integer());
  if (in_->peek() != Tag::real) mismatch("float");
  return in_->take().real();
}

std::complex<double> ValueReader::complex() {
  if (in_->peek() != Tag::complex) return real();
  const auto& in = in_->take();
  return {in.real(), in.imaginary()};
}

std::string ValueReader::text() {
  if (in_->peek() != Tag::text) mismatch("str");
  const auto text = in_->take().text();
  in_->charge(text.size());
  return std::string(text);
}

std::vector<std::byte> ValueReader::bytes() {
  const auto tag = in_->peek();
  if (tag != Tag::bytes && tag != Tag::bytearray) mismatch("bytes");
  const auto view = in_->take().view();
  in_->charge(view.size());
  return {view.begin(), view.end()};
}

Tensor ValueReader::tensor() {
  const auto tag = in_->peek();
  if (tag == Tag::tensor) {
    auto out = tensor_of(in_->take(), in_->message());
    // Its bytes may still be on their way, in the order of a stream that a Tensor does not know.
    if (out.device().type != DeviceType::cpu) mismatch("tensor in host memory; an at::Tensor may be on a GPU");
    return out;
  }
  if (tag != Tag::array) mismatch("tensor");
  auto& in = in_->take();
  in_->charge(in.view().size());
  if (auto tensor = tensor_of_array(in, in_->message())) return *std::move(tensor);
  mismatch("tensor");
}

Object ValueReader::object() {
  if (in_->peek() != Tag::reference) mismatch("reference");
  const auto& record = in_->take().reference();
  auto* core = in_->core();
  if (core == nullptr) throw InvalidArgument("a reference cannot be read in this place");
  const auto& sender = in_->sender();
  const ReferenceMarshaller references(*core->member, sender.name, sender.incarnation == 0 ? nullptr : &sender);
  return {core->shared_from_this(), detail::value_or_throw(references.receive(record))};
}

bool ValueReader::none() {
  if (in_->peek() != Tag::none) return false;
  in_->take();
  return true;
}

std::size_t ValueReader::begin_sequence() {
  const auto tag = in_->peek();
  if (tag != Tag::tuple && tag != Tag::list && tag != Tag::record) mismatch("list");
  return in_->take().count();
}

std::size_t ValueReader::begin_dict() {
  if (in_->peek() != Tag::dict) mismatch("dict");
  return in_->take().count();
}

void ValueReader::leave() { in_->leave(); }
void ValueReader::mismatch(std::string expected) { in_->mismatch(expected); }

}  // namespace tensorferry
