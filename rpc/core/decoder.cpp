#include "rpc/core/decoder.h"

#include "base/text.h"

namespace tensorferry {
namespace {

// The bounds of c10::DeviceType, which has 21 types, and of c10::DeviceIndex.
constexpr std::uint8_t last_device_type = 63;
constexpr std::uint8_t last_device_index = 127;

}  // namespace

Tag Decoder::fail(const char* why) {
  if (failure_ == nullptr) {
    failure_ = why;
    failed_at_ = whole_ - reader_.rest().size();
  }
  reader_.fail();
  return Tag::invalid;
}

Status Decoder::status() const {
  if (failure_ == nullptr) return {};
  // If the reader ran out of bytes, failed_at_ is the end of the message: a failed Reader has no position.
  return {Code::protocol_error, formatted("a message {}{}{} (byte {} of {})", failure_, detail_.empty() ? "" : ": ",
                                          detail_, failed_at_, whole_)};
}

Status Decoder::finish() {
  if (failure_ == nullptr && !reader_.empty()) fail("has bytes after its last value");
  return status();
}

std::optional<std::size_t> Decoder::inside(Tag tag) const {
  switch (tag) {
    case Tag::dict:
      return count() * 2;
    case Tag::tuple:
    case Tag::list:
    case Tag::set:
    case Tag::frozenset:
    case Tag::record:
    case Tag::pickled:
    case Tag::sparse:
      return count();
    default:
      return std::nullopt;
  }
}

bool Decoder::skip() {
  const auto tag = next();
  if (tag == Tag::invalid) return false;
  const auto values = inside(tag);
  if (!values) return true;
  for (auto left = *values; left != 0; --left) {
    if (!skip()) return false;
  }
  leave();
  return true;
}

Tag Decoder::composite(Tag tag) {
  switch (tag) {
    case Tag::big_integer:
      return read_big_integer();
    case Tag::complex:
      value_.real = reader_.get<double>();
      value_.imaginary = reader_.get<double>();
      return checked(tag);
    case Tag::text:
    case Tag::bytes:
    case Tag::bytearray:
      return read_string(tag);
    case Tag::tuple:
    case Tag::set:
    case Tag::frozenset:
      return enter(tag, reader_.varint(), 1, false);
    case Tag::list:
      return enter(tag, reader_.varint(), 1, true);
    case Tag::dict:
      return enter(tag, reader_.varint(), 2, true);
    case Tag::tensor:
      return read_tensor();
    case Tag::sparse:
      return read_sparse();
    case Tag::array:
      return read_array();
    case Tag::pickled:
      return read_pickled();
    case Tag::reference:
      return read_reference();
    case Tag::published:
      return read_published();
    case Tag::record:
      return read_record();
    case Tag::dtype:
      value_.leaf = reader_.get<std::uint8_t>();
      return size_of(dtype()) != 0 ? checked(tag) : fail("names an unknown dtype");
    case Tag::layout:
      return read_leaf(tag, static_cast<std::uint8_t>(LayoutNumber::jagged));
    case Tag::memory_format:
      return read_leaf(tag, static_cast<std::uint8_t>(MemoryFormatNumber::channels_last_3d));
    case Tag::device:
      value_.view = reader_.sized();
      value_.far.reset();
      return checked(tag);
    case Tag::size:
      return read_size();
    case Tag::again:
      return read_again();
    default:
      return fail("holds a value of an unknown kind");
  }
}

Tag Decoder::read_leaf(Tag tag, std::uint8_t most) {
  value_.leaf = reader_.get<std::uint8_t>();
  return value_.leaf <= most ? checked(tag) : fail("names an unknown torch constant");
}

Tag Decoder::read_big_integer() {
  const auto sign = reader_.get<std::uint8_t>();
  value_.view = reader_.sized();
  value_.far.reset();
  if (sign > 1) return fail("holds an integer with neither sign");
  value_.negative = sign == 1;
  return checked(Tag::big_integer);
}

Tag Decoder::read_string(Tag tag) {
  if (!read_blob(value_.view, value_.far)) return Tag::invalid;
  if (tag == Tag::bytearray || value_.far) value_.number = numbers_++;
  return tag;
}

bool Decoder::read_blob(ByteView& view, std::optional<std::uint32_t>& far) {
  const auto word = reader_.varint();
  if ((word & 1) == 0) {
    view = reader_.raw(word >> 1);
    far.reset();
    return checked(Tag::bytes) != Tag::invalid;
  }
  const auto index = word >> 1;
  if (index >= buffers_.size()) {
    fail("names a buffer that it does not have");
    return false;
  }
  const auto& buffer = buffers_[index];
  if (buffer.device.type != DeviceType::cpu) {
    fail("has bytes on a device that can hold only tensors");
    return false;
  }
  if (uses_[index] != Use::none) {
    fail("names one buffer as the bytes of two values");
    return false;
  }
  uses_[index] = Use::bytes;
  view = {buffer.data, buffer.bytes};
  far = static_cast<std::uint32_t>(index);
  return true;
}

void Decoder::read_dims(Dims& dims) {
  dims.clear();
  const auto rank = reader_.get<std::uint8_t>();
  if (rank > Dims::max) {
    fail("has a tensor of more than 64 dimensions");
    return;
  }
  // A number of 2^63 or more becomes negative, and validate() refuses it.
  for (std::size_t i = 0; i < rank; ++i) dims.push_back(static_cast<std::int64_t>(reader_.varint()));
}

Tag Decoder::read_size() {
  read_dims(value_.tensor.sizes);
  for (std::size_t i = 0; i < value_.tensor.sizes.size(); ++i) {
    const auto bits = static_cast<std::uint64_t>(value_.tensor.sizes[i]);
    value_.tensor.sizes[i] = static_cast<std::int64_t>(bits >> 1) ^ -static_cast<std::int64_t>(bits & 1);
  }
  return checked(Tag::size);
}

Tag Decoder::read_tensor() {
  value_.tensor.dtype = static_cast<DType>(reader_.get<std::uint8_t>());
  const auto flags = reader_.get<std::uint8_t>();
  constexpr auto ours = tensor_has::offset | tensor_has::device | tensor_has::strides;
  value_.tensor.flags = static_cast<std::uint8_t>(flags & ~ours);
  value_.tensor.device = {};
  if ((flags & tensor_has::device) != 0) {
    const auto type = reader_.get<std::uint8_t>();
    const auto index = reader_.get<std::uint8_t>();
    if (type > last_device_type || index > last_device_index) return fail("names a device that cannot exist");
    value_.tensor.device = {static_cast<DeviceType>(type), index};
  }
  read_dims(value_.tensor.sizes);
  if ((flags & tensor_has::strides) != 0) {
    value_.tensor.strides.clear();
    for (std::size_t i = 0; i < value_.tensor.sizes.size(); ++i) {
      value_.tensor.strides.push_back(static_cast<std::int64_t>(reader_.varint()));
    }
  } else if (!value_.tensor.set_contiguous()) {
    return fail("has a tensor of more than 2^63 elements");
  }
  value_.tensor.storage_offset =
      (flags & tensor_has::offset) != 0 ? static_cast<std::int64_t>(reader_.varint()) : std::int64_t{0};
  const auto index = reader_.varint();
  if (checked(Tag::tensor) == Tag::invalid) return Tag::invalid;
  if (index >= buffers_.size()) return fail("names a buffer that it does not have");
  if (uses_[index] == Use::bytes) return fail("names one buffer as a tensor and as bytes");
  uses_[index] = Use::tensors;
  if (auto valid = validate(value_.tensor, buffers_[index].bytes); !valid.ok()) {
    detail_ = valid.what();
    return fail("has an invalid tensor");
  }
  value_.buffer = static_cast<std::uint32_t>(index);
  value_.number = numbers_++;
  return Tag::tensor;
}

Tag Decoder::read_sparse() {
  const auto kind = reader_.get<std::uint8_t>();
  value_.sparse.flags = reader_.get<std::uint8_t>();
  read_dims(value_.sparse.sizes);
  constexpr auto known = SparseLayout::requires_grad | SparseLayout::parameter | SparseLayout::coalesced;
  if (kind > static_cast<std::uint8_t>(SparseLayout::Kind::bsc) || (value_.sparse.flags & ~known) != 0) {
    return fail("has a sparse tensor of an unknown kind");
  }
  value_.sparse.kind = static_cast<SparseLayout::Kind>(kind);
  for (const auto size : value_.sparse.sizes) {
    if (size < 0) return fail("has a sparse tensor of a negative size");
  }
  if (checked(Tag::sparse) == Tag::invalid) return Tag::invalid;
  return enter(Tag::sparse, value_.sparse.parts(), 1, false);
}

Tag Decoder::read_array() {
  value_.array.flags = reader_.get<std::uint8_t>();
  const auto dtype = reader_.text();
  const auto item_bytes = reader_.varint();
  read_dims(value_.array.sizes);
  if (!read_blob(value_.view, value_.far)) return Tag::invalid;
  if (dtype.size() > 32 || item_bytes > 0x7fffffff) return fail("has an array of an invalid dtype");
  value_.array.dtype = dtype;
  value_.array.item_bytes = static_cast<std::uint32_t>(item_bytes);
  if (auto valid = validate(value_.array, value_.view.size()); !valid.ok()) {
    detail_ = valid.what();
    return fail("has an invalid array");
  }
  value_.number = numbers_++;
  return Tag::array;
}

Tag Decoder::read_pickled() {
  ByteView stream;
  std::optional<std::uint32_t> far;
  if (!read_blob(stream, far)) return Tag::invalid;
  const auto buffers = reader_.count(2);
  value_.pickle_buffers.clear();
  for (std::uint64_t i = 0; i < buffers; ++i) {
    PickleBuffer buffer;
    const auto read_only = reader_.get<std::uint8_t>();
    if (read_only > 1) return fail("has a pickle buffer of an unknown kind");
    buffer.read_only = read_only == 1;
    if (!read_blob(buffer.bytes, buffer.far)) return Tag::invalid;
    value_.pickle_buffers.push_back(buffer);
  }
  const auto parts = reader_.varint();
  if (checked(Tag::pickled) == Tag::invalid) return Tag::invalid;
  value_.view = stream;
  value_.far = far;
  return enter(Tag::pickled, parts, 1, false);
}

Tag Decoder::read_reference() {
  value_.reference = read<ReferenceRecord>(reader_);
  if (checked(Tag::reference) == Tag::invalid) return Tag::invalid;
  value_.number = numbers_++;
  return Tag::reference;
}

Tag Decoder::read_record() {
  const auto kind = reader_.get<std::uint8_t>();
  const auto schema = reader_.varint();
  if (kind > static_cast<std::uint8_t>(RecordKind::structure) || schema > 0xffffffff) {
    return fail("has a record of an unknown kind");
  }
  value_.record_kind = static_cast<RecordKind>(kind);
  value_.schema = static_cast<std::uint32_t>(schema);
  value_.record_name = schema == 0 ? reader_.text() : std::string_view{};
  const auto fields = reader_.varint();
  if (checked(Tag::record) == Tag::invalid) return Tag::invalid;
  return enter(Tag::record, fields, 1, false);
}

Tag Decoder::read_published() {
  value_.view = reader_.sized();
  value_.far.reset();
  const auto count = reader_.count(2);
  value_.parts.clear();
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto offset = reader_.varint();
    const auto bytes = reader_.varint();
    value_.parts.push_back({offset, bytes});
  }
  const auto index = count != 0 ? reader_.varint() : 0;
  if (checked(Tag::published) == Tag::invalid) return Tag::invalid;
  if (count != 0) {
    if (index >= buffers_.size()) return fail("names a buffer that it does not have");
    if (uses_[index] != Use::none) return fail("names one buffer as the bytes of two values");
    if (buffers_[index].device.type != DeviceType::cpu) return fail("has bytes on a device that can hold only tensors");
    uses_[index] = Use::bytes;
  }
  std::uint64_t end = 0;
  for (const auto& part : value_.parts) {
    // Overlapping parts could make the receiver copy the same bytes many times for a short message.
    if (part.offset < end || part.offset % PublishedPart::alignment != 0 || part.offset > buffers_[index].bytes ||
        part.bytes > buffers_[index].bytes - part.offset) {
      return fail("has a published value whose buffers do not lie at their stated places");
    }
    end = part.offset + part.bytes;
  }
  value_.buffer = static_cast<std::uint32_t>(index);
  value_.number = numbers_++;
  return Tag::published;
}

Tag Decoder::read_again() {
  const auto number = reader_.varint();
  if (checked(Tag::again) == Tag::invalid) return Tag::invalid;
  if (number >= numbers_) return fail("refers to a value that comes later");
  for (std::size_t i = 0; i < depth_; ++i) {
    if (open_[i].number == number && !open_[i].may_hold_itself) {
      return fail("has a value that holds itself by other means than lists and dicts");
    }
  }
  value_.referred = static_cast<std::uint32_t>(number);
  return Tag::again;
}

}  // namespace tensorferry
