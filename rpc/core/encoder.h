/// The writer of the codec; see codec.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "base/record.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "rpc/core/codec.h"
#include "rpc/core/identity_map.h"
#include "rpc/core/layout.h"
#include "rpc/core/reference_id.h"

namespace tensorferry {

/// Writes the values of one message. Not thread-safe; used once.
///
/// Identity: an object that a message holds twice is sent once. Both ends number the values that may occur again, in
/// the order in which they begin: tuples, lists, dicts, sets, frozensets, bytearrays, tensors, sparse tensors, arrays,
/// pickled and published values, references, records, and strings that travel as buffers. If an object may have more
/// than one holder (in Python: a reference count above 1), the caller first calls `again(address)`. If that returns
/// false, it writes the object with the same address as `identity`. A null `identity` means that the object cannot
/// occur again. An address must stay in use until `take()`, or another object at the same address would be mistaken for
/// the first.
///
/// Errors are sticky: status() returns the first one, and later writes have no effect on it.
class Encoder {
 public:
  Encoder() { grow(initial_bytes); }
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  // ---- leaves
  void none() { *room(1)++ = byte_of(Tag::none); }
  void boolean(bool value) { *room(1)++ = byte_of(value ? Tag::true_ : Tag::false_); }
  void integer(std::int64_t value) {
    auto& at = room(1 + max_varint);
    if (value >= short_form::least_integer && value <= short_form::most_integer) {
      *at++ = static_cast<std::byte>(value + short_form::integer_zero);
    } else {
      *at++ = byte_of(Tag::integer);
      put_varint(at, zigzag(value));
    }
  }
  /// `magnitude`: little-endian.
  void big_integer(bool negative, ByteView magnitude);
  void real(double value) {
    auto& at = room(1 + sizeof value);
    *at++ = byte_of(Tag::real);
    put_raw(at, &value, sizeof value);
  }
  void complex(double real, double imaginary) {
    auto& at = room(1 + 2 * sizeof real);
    *at++ = byte_of(Tag::complex);
    put_raw(at, &real, sizeof real);
    put_raw(at, &imaginary, sizeof imaginary);
  }
  /// Writes the text into the stream, also if it is long. For names and other short text.
  void text(std::string_view value) {
    if (value.size() <= short_form::most_text) {
      auto& at = room(1 + short_form::most_text);
      *at++ = static_cast<std::byte>(short_form::text + value.size());
      put_raw(at, value.data(), value.size());
    } else {
      long_text(value);
    }
  }
  /// Writes the text into the stream if it has at most `inline_limit` bytes, else as a buffer. For a buffer, calls
  /// `owner()` once, which returns the owner of the bytes. bytes(), bytearray() and array() do the same.
  template <class MakeOwner>
  void text(std::string_view value, MakeOwner&& owner, const void* identity = nullptr) {
    if (value.size() <= inline_limit) return text(value);
    put_tag(Tag::text);
    number(identity);
    put_far(view_of(value), owner());
  }
  template <class MakeOwner>
  void bytes(ByteView value, MakeOwner&& owner, const void* identity = nullptr) {
    put_tag(Tag::bytes);
    if (value.size() <= inline_limit) return put_near(value);
    number(identity);
    put_far(value, owner());
  }
  template <class MakeOwner>
  void bytearray(ByteView value, MakeOwner&& owner, const void* identity = nullptr) {
    put_tag(Tag::bytearray);
    number(identity);
    if (value.size() <= inline_limit) return put_near(value);
    put_far(value, owner());
  }
  void dtype(DType value) { put_leaf(Tag::dtype, static_cast<std::uint8_t>(value)); }
  void layout(LayoutNumber value) { put_leaf(Tag::layout, static_cast<std::uint8_t>(value)); }
  void memory_format(MemoryFormatNumber value) { put_leaf(Tag::memory_format, static_cast<std::uint8_t>(value)); }
  void device(std::string_view value);  // torch's own text: "cpu", "cuda:1"
  void size(std::span<const std::int64_t> value);

  // ---- containers: begin_...(), the values, end(). False: nested too deep, or failed before; the caller then writes
  // neither values nor end().
  bool begin_tuple(std::size_t values, const void* identity = nullptr) {
    if (!enter(identity, false)) return false;
    put_short_count(Tag::tuple, short_form::tuple, values);
    return true;
  }
  bool begin_list(std::size_t values, const void* identity = nullptr) {
    if (!enter(identity, true)) return false;
    put_short_count(Tag::list, short_form::list, values);
    return true;
  }
  /// `pairs` times a key and then its value follow.
  bool begin_dict(std::size_t pairs, const void* identity = nullptr) { return begin(Tag::dict, pairs, identity, true); }
  bool begin_set(std::size_t values, const void* identity = nullptr) {
    return begin(Tag::set, values, identity, false);
  }
  bool begin_frozenset(std::size_t values, const void* identity = nullptr) {
    return begin(Tag::frozenset, values, identity, false);
  }
  /// `fields` values follow. `name` is the record's class ("module:qualname"). If `schema` is not 0, it is a number
  /// that both ends have agreed on for the class, and travels instead of the name.
  bool begin_record(RecordKind kind, std::string_view name, std::uint32_t schema, std::size_t fields,
                    const void* identity = nullptr);
  /// A pickled value: `stream` is a pickle of protocol 5, and `buffers` are its out-of-band buffers. `parts` values
  /// follow: the tensors, arrays and references of the pickle, which it names by number.
  struct PickleBuffer {
    ByteView bytes;
    bool read_only = false;
    Owner owner;  // kept only if the bytes travel as a buffer
  };
  bool begin_pickled(ByteView stream, Owner stream_owner, std::span<const PickleBuffer> buffers, std::size_t parts,
                     const void* identity = nullptr);
  /// layout.parts() tensors follow.
  bool begin_sparse(const SparseLayout& layout, const void* identity = nullptr);
  void end() { --depth_; }

  // ---- values in buffers
  /// Reserves space for `count` buffers.
  void expect_buffers(std::size_t count) {
    buffers_.reserve(count);
    destinations_.reserve(count);
  }
  /// Adds a buffer for tensors, and returns its index.
  std::uint32_t add_buffer(Buffer buffer, Destination destination) {
    buffers_.push_back(std::move(buffer));
    destinations_.push_back(destination);
    return static_cast<std::uint32_t>(buffers_.size() - 1);
  }
  /// The same for a buffer that is handed over instead of copied.
  std::uint32_t add_shared_buffer(Buffer buffer, Device device, Sharing sharing = Sharing::shared) {
    const auto index = add_buffer(std::move(buffer), {device});
    sharing_.resize(index + 1, Sharing::by_value);
    sharing_[index] = sharing;
    return index;
  }
  /// Writes a tensor that lies in `buffer`. `layout` must pass validate() for that buffer; else fails with Internal.
  void tensor(const TensorLayout& layout, std::uint32_t buffer, const void* identity = nullptr);
  /// Writes an array. `elements` are contiguous, in the order that `layout` names.
  template <class MakeOwner>
  void array(const ArrayLayout& layout, ByteView elements, MakeOwner&& owner, const void* identity = nullptr) {
    put_array(layout, identity);
    if (elements.size() <= inline_limit) return put_near(elements);
    put_far(elements, owner());
  }
  void reference(const ReferenceRecord& record, const void* identity = nullptr);
  /// Writes a published value: a payload of another Encoder, and the parts of `region` that are that payload's buffers.
  /// The region travels as a buffer of frozen memory, or not at all if there are no parts.
  void published(ByteView payload, std::span<const PublishedPart> parts, const Buffer& region,
                 const void* identity = nullptr);

  // ---- identity
  /// Writes a back-reference and returns true if the message holds the object already. A tuple, set, frozenset, record,
  /// sparse or pickled value that holds itself fails the message, because the receiver cannot make it before its
  /// values; the caller then pickles the whole.
  bool again(const void* identity) {
    const auto number = seen_.find(identity);
    return number ? put_again(*number) : false;
  }

  // ---- raw numbers, texts and wire records (base/record.h), for envelopes
  void raw_u8(std::uint8_t value) { *room(1)++ = static_cast<std::byte>(value); }
  void raw_varint(std::uint64_t value) { put_varint(room(max_varint), value); }
  void raw_text(std::string_view value);  // length, then the bytes
  void raw(const WireRecord auto& record) {
    const auto bytes = encode(record);
    put_raw(room(bytes.size()), bytes.data(), bytes.size());
  }

  // ---- the result
  [[nodiscard]] bool failed() const noexcept { return failure_ != nullptr; }
  /// Returns Ok, or why the message cannot be sent. InvalidArgument: a value cannot be sent. Internal: the calling code
  /// is wrong.
  [[nodiscard]] Status status() const;
  [[nodiscard]] std::size_t size() const noexcept { return static_cast<std::size_t>(at_ - bytes_.data()); }
  /// Returns the message: payload, buffers, destinations. Call it once, and only if status() is Ok.
  Message take();

 private:
  static constexpr std::size_t initial_bytes = 240;
  static constexpr std::size_t max_varint = 10;

  static constexpr std::byte byte_of(Tag tag) { return static_cast<std::byte>(tag); }
  static constexpr std::uint64_t zigzag(std::int64_t value) {
    return (static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63);
  }
  static void put_varint(std::byte*& at, std::uint64_t value) {
    while (value >= 0x80) {
      *at++ = static_cast<std::byte>(value | 0x80);
      value >>= 7;
    }
    *at++ = static_cast<std::byte>(value);
  }
  static void put_raw(std::byte*& at, const void* from, std::size_t bytes) {
    if (bytes != 0) std::memcpy(at, from, bytes);
    at += bytes;
  }

  /// Returns the write position, with space for `bytes` bytes behind it.
  std::byte*& room(std::size_t bytes) {
    if (static_cast<std::size_t>(end_ - at_) < bytes) [[unlikely]] {
      grow(bytes);
    }
    return at_;
  }
  void grow(std::size_t bytes);

  void number(const void* identity) {
    if (identity != nullptr) seen_.insert(identity, numbers_);
    ++numbers_;
  }
  bool enter(const void* identity, bool may_hold_itself) {
    if (depth_ >= max_depth || failed()) [[unlikely]] {
      return too_deep();
    }
    open_[depth_++] = {numbers_, may_hold_itself};
    number(identity);
    return true;
  }
  bool begin(Tag tag, std::size_t values, const void* identity, bool may_hold_itself) {
    if (!enter(identity, may_hold_itself)) return false;
    put_tag(tag);
    raw_varint(values);
    return true;
  }
  void put_tag(Tag tag) { *room(1)++ = byte_of(tag); }
  void put_leaf(Tag tag, std::uint8_t value) {
    auto& at = room(2);
    *at++ = byte_of(tag);
    *at++ = static_cast<std::byte>(value);
  }
  void put_short_count(Tag tag, std::uint8_t base, std::size_t values) {
    auto& at = room(1 + max_varint);
    if (values <= short_form::most_count) {
      *at++ = static_cast<std::byte>(base + values);
    } else {
      *at++ = byte_of(tag);
      put_varint(at, values);
    }
  }
  bool too_deep();
  bool put_again(std::uint32_t number);
  void long_text(std::string_view value);
  void put_near(ByteView bytes);
  void put_far(ByteView bytes, Owner owner);
  void put_array(const ArrayLayout& layout, const void* identity);
  void put_dims(std::span<const std::int64_t> dims);
  void fail(Code code, const char* why) {
    if (failure_ == nullptr) {
      failure_ = why;
      failure_code_ = code;
    }
  }

  std::byte* at_ = nullptr;   // the write position
  std::byte* end_ = nullptr;  // the end of bytes_, whose size is its capacity until take()
  Bytes bytes_;
  std::vector<Buffer> buffers_;
  std::vector<Destination> destinations_;
  std::vector<Sharing> sharing_;  // as in Message
  IdentityMap seen_;
  std::uint32_t numbers_ = 0;
  std::size_t depth_ = 0;
  const char* failure_ = nullptr;
  Code failure_code_ = Code::ok;
  std::array<OpenContainer, max_depth> open_;  // the containers around the next value; the first depth_ are set
};

}  // namespace tensorferry
