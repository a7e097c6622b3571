#include "rpc/core/encoder.h"

#include <algorithm>
#include <limits>

namespace tensorferry {

void Encoder::grow(std::size_t bytes) {
  const auto used = at_ == nullptr ? 0 : size();
  bytes_.resize(std::max(used + bytes, bytes_.size() * 2));
  at_ = bytes_.data() + used;
  end_ = bytes_.data() + bytes_.size();
}

void Encoder::big_integer(bool negative, ByteView magnitude) {
  put_tag(Tag::big_integer);
  raw_u8(negative ? 1 : 0);
  raw_varint(magnitude.size());
  put_raw(room(magnitude.size()), magnitude.data(), magnitude.size());
}

void Encoder::device(std::string_view value) {
  put_tag(Tag::device);
  raw_text(value);
}

void Encoder::size(std::span<const std::int64_t> value) {
  if (value.size() > Dims::max)
    return fail(Code::invalid_argument, "a torch.Size of more than 64 numbers cannot be sent");
  put_tag(Tag::size);
  raw_u8(static_cast<std::uint8_t>(value.size()));
  for (const auto each : value) raw_varint(zigzag(each));
}

bool Encoder::begin_record(RecordKind kind, std::string_view name, std::uint32_t schema, std::size_t fields,
                           const void* identity) {
  if (!enter(identity, false)) return false;
  put_leaf(Tag::record, static_cast<std::uint8_t>(kind));
  raw_varint(schema);
  if (schema == 0) raw_text(name);
  raw_varint(fields);
  return true;
}

bool Encoder::begin_pickled(ByteView stream, Owner stream_owner, std::span<const PickleBuffer> buffers,
                            std::size_t parts, const void* identity) {
  if (!enter(identity, false)) return false;
  const auto put_blob = [this](ByteView bytes, Owner owner) {
    if (bytes.size() <= inline_limit) return put_near(bytes);
    put_far(bytes, std::move(owner));
  };
  put_tag(Tag::pickled);
  put_blob(stream, std::move(stream_owner));
  raw_varint(buffers.size());
  for (const auto& buffer : buffers) {
    raw_u8(buffer.read_only ? 1 : 0);
    put_blob(buffer.bytes, buffer.owner);
  }
  raw_varint(parts);
  return true;
}

bool Encoder::begin_sparse(const SparseLayout& layout, const void* identity) {
  if (!enter(identity, false)) return false;
  put_leaf(Tag::sparse, static_cast<std::uint8_t>(layout.kind));
  raw_u8(layout.flags);
  put_dims(layout.sizes);
  return true;
}

void Encoder::tensor(const TensorLayout& layout, std::uint32_t buffer, const void* identity) {
  if (buffer >= buffers_.size() || !validate(layout, buffers_[buffer].bytes).ok()) {
    return fail(Code::internal, "a tensor that does not lie in its buffer cannot be sent");
  }
  const bool strided = !layout.is_contiguous();
  const bool elsewhere = layout.device != Device{};
  number(identity);
  put_leaf(Tag::tensor, static_cast<std::uint8_t>(layout.dtype));
  raw_u8(static_cast<std::uint8_t>(layout.flags | (layout.storage_offset != 0 ? tensor_has::offset : 0) |
                                   (elsewhere ? tensor_has::device : 0) | (strided ? tensor_has::strides : 0)));
  if (elsewhere) {
    raw_u8(static_cast<std::uint8_t>(layout.device.type));
    raw_u8(layout.device.index);
  }
  put_dims(layout.sizes);
  if (strided) {
    for (const auto stride : layout.strides) raw_varint(static_cast<std::uint64_t>(stride));
  }
  if (layout.storage_offset != 0) raw_varint(static_cast<std::uint64_t>(layout.storage_offset));
  raw_varint(buffer);
}

void Encoder::put_array(const ArrayLayout& layout, const void* identity) {
  number(identity);
  put_leaf(Tag::array, layout.flags);
  raw_text(layout.dtype);
  raw_varint(layout.item_bytes);
  put_dims(layout.sizes);
}

void Encoder::reference(const ReferenceRecord& record, const void* identity) {
  number(identity);
  put_tag(Tag::reference);
  raw(record);
}

void Encoder::published(ByteView payload, std::span<const PublishedPart> parts, const Buffer& region,
                        const void* identity) {
  number(identity);
  put_tag(Tag::published);
  raw_varint(payload.size());
  put_raw(room(payload.size()), payload.data(), payload.size());
  raw_varint(parts.size());
  for (const auto& part : parts) {
    raw_varint(part.offset);
    raw_varint(part.bytes);
  }
  if (!parts.empty()) raw_varint(add_shared_buffer(region, Device{}, Sharing::frozen));
}

void Encoder::raw_text(std::string_view value) {
  raw_varint(value.size());
  put_raw(room(value.size()), value.data(), value.size());
}

void Encoder::long_text(std::string_view value) {
  put_tag(Tag::text);
  put_near(view_of(value));
}

/// Writes a blob into the stream: twice its length as a varint, then the bytes. put_far() writes twice the index of a
/// buffer, plus one.
void Encoder::put_near(ByteView bytes) {
  raw_varint(std::uint64_t{bytes.size()} << 1);
  put_raw(room(bytes.size()), bytes.data(), bytes.size());
}

void Encoder::put_far(ByteView bytes, Owner owner) {
  // The const_cast is safe, because senders only read buffers.
  auto* data = const_cast<std::byte*>(bytes.data());
  const auto index = add_buffer(Buffer{Device{}, data, bytes.size(), nullptr, std::move(owner)}, {});
  raw_varint(std::uint64_t{index} << 1 | 1);
}

void Encoder::put_dims(std::span<const std::int64_t> dims) {
  raw_u8(static_cast<std::uint8_t>(dims.size()));
  for (const auto dim : dims) raw_varint(static_cast<std::uint64_t>(dim));
}

bool Encoder::put_again(std::uint32_t number) {
  for (std::size_t i = 0; i < depth_; ++i) {
    if (open_[i].number == number && !open_[i].may_hold_itself) {
      fail(Code::invalid_argument, "a value that holds itself by other means than lists and dicts cannot be sent");
    }
  }
  put_tag(Tag::again);
  raw_varint(number);
  return true;
}

bool Encoder::too_deep() {
  fail(Code::invalid_argument, "values nested more than 200 deep cannot be sent");
  return false;
}

Status Encoder::status() const {
  if (failure_ != nullptr) return {failure_code_, failure_};
  // A shorter payload holds fewer than 2^32 values, because each takes at least a byte, so their numbers fit 32 bits.
  if (size() >= longest_payload)
    return {Code::invalid_argument, "more than 4 GiB of values outside of buffers cannot be sent"};
  return {};
}

Message Encoder::take() {
  bytes_.resize(size());
  return Message{.payload = std::move(bytes_),
                 .buffers = std::move(buffers_),
                 .destinations = std::move(destinations_),
                 .sharing = std::move(sharing_)};
}

}  // namespace tensorferry
