/// The codec of arguments and results: values as a compact stream of bytes. docs/codec.md describes it byte by byte.
///
/// `Encoder` and `Decoder` know the stream, not the language. The layer above walks its own objects (Python's or C++'s)
/// and calls one function for each value. A value arrives with the type that it had. So the caller maps exact types
/// alone (a bool is not an int, an instance of a subclass of dict is not a dict), and sends all others as `pickled` or
/// `record`.
///
/// Large bytes travel as buffers beside the stream: tensors, and above `inline_limit` arrays, strings, pickles and
/// pickle's out-of-band buffers.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "base/record.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "rpc/core/identity_map.h"
#include "rpc/core/layout.h"
#include "rpc/core/reference_id.h"

namespace tensorferry {

template <>
inline constexpr std::tuple fields_of<ReferenceRecord>{&ReferenceRecord::owner,    &ReferenceRecord::object,
                                                       &ReferenceRecord::fork,     &ReferenceRecord::parent,
                                                       &ReferenceRecord::receiver, &ReferenceRecord::type_hint};

/// The kind of a value. The numbers travel: never renumber. First bytes from 0x40 on are short forms (docs/codec.md);
/// the Decoder reports them by these tags too.
enum class Tag : std::uint8_t {
  none = 0x00,
  false_ = 0x01,
  true_ = 0x02,
  integer = 0x03,      // 64 bits, signed
  big_integer = 0x04,  // beyond 64 bits
  real = 0x05,
  complex = 0x06,
  text = 0x07,  // UTF-8, opaque here (Python: surrogatepass)
  bytes = 0x08,
  bytearray = 0x09,
  tuple = 0x0a,
  list = 0x0b,
  dict = 0x0c,
  set = 0x0d,
  frozenset = 0x0e,
  tensor = 0x0f,  // strided
  sparse = 0x10,
  array = 0x11,  // numpy
  pickled = 0x12,
  reference = 0x13,      // a remote object
  record = 0x14,         // named tuple, dataclass, registered struct
  dtype = 0x15,          // torch.float32
  device = 0x16,         // torch.device("cuda:1")
  size = 0x17,           // torch.Size
  layout = 0x18,         // torch.strided, ...
  memory_format = 0x19,  // torch.channels_last, ...
  again = 0x1a,          // a back-reference to an earlier value of the message
  published = 0x1b,      // a value that was encoded once for many messages (published.h)
  invalid = 0x3f,        // never on the wire: the Decoder failed
};

/// Longer strings, byte strings and arrays travel as buffers. Beyond this size the two copies through the stream cost
/// more than a buffer's record in the frame and its acknowledgement.
inline constexpr std::size_t inline_limit = 8 * 1024;
/// Payloads are shorter than this, because the numbers of values have 32 bits.
inline constexpr std::size_t longest_payload = 0xffffffff;
/// Both ends refuse values that are nested deeper, because the layers above recurse.
inline constexpr std::size_t max_depth = 200;

enum class RecordKind : std::uint8_t { named_tuple = 0, dataclass = 1, structure = 2 };

/// The part of the region of a published value that holds one of the value's buffers.
struct PublishedPart {
  static constexpr std::size_t alignment = 64;  // of `offset`
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// The numbers by which torch.layout and torch.memory_format travel.
enum class LayoutNumber : std::uint8_t {
  strided = 0,
  coo = 1,
  csr = 2,
  csc = 3,
  bsr = 4,
  bsc = 5,
  mkldnn = 6,
  jagged = 7
};
enum class MemoryFormatNumber : std::uint8_t { contiguous = 0, preserve = 1, channels_last = 2, channels_last_3d = 3 };

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
    if (value >= least_short_integer && value <= most_short_integer) {
      *at++ = static_cast<std::byte>(value + short_integer_zero);
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
    if (value.size() <= most_short_text) {
      auto& at = room(1 + most_short_text);
      *at++ = static_cast<std::byte>(short_text + value.size());
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
    put_short_count(Tag::tuple, short_tuple, values);
    return true;
  }
  bool begin_list(std::size_t values, const void* identity = nullptr) {
    if (!enter(identity, true)) return false;
    put_short_count(Tag::list, short_list, values);
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
  friend class Decoder;
  static constexpr std::uint8_t short_text = 0x40;   // .. 0x5f: length
  static constexpr std::uint8_t short_tuple = 0x60;  // .. 0x6f: count
  static constexpr std::uint8_t short_list = 0x70;   // .. 0x7f: count
  static constexpr std::uint8_t short_integer = 0x80;
  static constexpr std::int64_t short_integer_zero = 0xa0;
  static constexpr std::size_t most_short_text = 31;
  static constexpr std::size_t most_short_count = 15;
  static constexpr std::uint8_t tensor_has_offset = 0x20;  // bits beside those of TensorLayout::Flag
  static constexpr std::uint8_t tensor_has_device = 0x40;
  static constexpr std::uint8_t tensor_has_strides = 0x80;
  static constexpr std::int64_t least_short_integer = -32;
  static constexpr std::int64_t most_short_integer = 95;

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
    if (values <= most_short_count) {
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
  struct Open {
    std::uint32_t number;
    bool may_hold_itself;  // true for a list and a dict, which the receiver makes before their values
  };
  std::array<Open, max_depth> open_;  // the containers around the next value; the first depth_ are set
};

/// Reads a payload value by value. `next()` returns the tag of the next value, and reads all of the value except the
/// values inside it. Until the next `next()`, the getters return what it has read. Not thread-safe.
///
/// The bytes come from a peer and are not trusted. The Decoder checks each length, count, number and layout before it
/// returns them. Containers cannot announce more values than there are bytes, and nesting ends at `max_depth`. After a
/// failure `next()` always returns `invalid`, so a caller stops at the first `invalid` and then reads `status()`.
///
/// Payload and buffers must outlive the Decoder and the views that it returns, and must not change meanwhile.
class Decoder {
 public:
  static constexpr std::uint32_t unnumbered = 0xffffffff;

  Decoder(ByteView payload, std::span<const Buffer> buffers)
      : reader_(payload),
        buffers_(buffers),
        uses_(buffers.size(), Use::none),
        whole_(payload.size()),
        announceable_(payload.size()) {
    if (payload.size() >= longest_payload) fail("is longer than 4 GiB");
  }

  Tag next() {
    number_ = unnumbered;
    if (reader_.empty()) [[unlikely]] {
      return fail("ends where a value should be");
    }
    const auto first = reader_.get<std::uint8_t>();
    if (first >= Encoder::short_integer) {
      integer_ = first - Encoder::short_integer_zero;
      return Tag::integer;
    }
    if (first >= Encoder::short_list) return enter(Tag::list, first - Encoder::short_list, 1, true);
    if (first >= Encoder::short_tuple) return enter(Tag::tuple, first - Encoder::short_tuple, 1, false);
    if (first >= Encoder::short_text) {
      view_ = reader_.raw(first - Encoder::short_text);
      far_.reset();
      return checked(Tag::text);
    }
    switch (static_cast<Tag>(first)) {
      case Tag::none:
      case Tag::false_:
      case Tag::true_:
        return static_cast<Tag>(first);
      case Tag::integer: {
        const auto bits = reader_.varint();
        integer_ = static_cast<std::int64_t>(bits >> 1) ^ -static_cast<std::int64_t>(bits & 1);
        return checked(Tag::integer);
      }
      case Tag::real:
        real_ = reader_.get<double>();
        return checked(Tag::real);
      default:
        return composite(static_cast<Tag>(first));
    }
  }
  /// Ends a tuple, list, dict, set, frozenset, record, pickled or sparse value, after its last value. Call it also if
  /// the container has no values.
  void leave() {
    if (depth_ != 0) --depth_;
  }
  /// Returns the number of values inside the value of which next() has returned `tag`; nullopt unless leave() ends it.
  [[nodiscard]] std::optional<std::size_t> inside(Tag tag) const;
  /// Reads one value with all values inside, and returns nothing of it. False: failed.
  bool skip();

  // ---- the value that next() has read; each comment begins with the tags for which the getter is valid
  /// integer.
  [[nodiscard]] std::int64_t integer() const noexcept { return integer_; }
  /// real, complex.
  [[nodiscard]] double real() const noexcept { return real_; }
  [[nodiscard]] double imaginary() const noexcept { return imaginary_; }
  /// text, bytes, bytearray: the bytes. big_integer: the magnitude, little-endian. array: the elements. pickled: the
  /// stream. device: its text. published: the payload. The view lies in the payload, or in the buffer far(), which is
  /// in host memory.
  [[nodiscard]] ByteView view() const noexcept { return view_; }
  [[nodiscard]] std::string_view text() const noexcept { return text_of(view_); }
  /// Returns the index of the buffer that view() is the whole of; nullopt if view() lies in the payload. The caller may
  /// keep the buffer's owner, and so the bytes, without a copy.
  [[nodiscard]] std::optional<std::uint32_t> far() const noexcept { return far_; }
  /// big_integer.
  [[nodiscard]] bool negative() const noexcept { return negative_; }
  /// The number of values that follow before leave(). tuple, list, set, frozenset: the values. dict: the pairs. record:
  /// the fields. pickled, sparse: the parts. All containers together announce no more values than the payload has
  /// bytes.
  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  /// The number of a value that `again` may name later, else `unnumbered`. The caller keeps such values in a table by
  /// number: a list or dict before it reads the values inside, all others when they are complete.
  [[nodiscard]] std::uint32_t number() const noexcept { return number_; }
  /// again: the number of a value that has begun before. It is complete, unless it is a list or dict.
  [[nodiscard]] std::uint32_t referred() const noexcept { return referred_; }
  /// The count of numbers assigned so far.
  [[nodiscard]] std::uint32_t numbers() const noexcept { return numbers_; }
  /// tensor: a layout that has passed validate() for buffers()[buffer()]. The tensor is on that buffer's device, which
  /// may differ from the layout's.
  [[nodiscard]] const TensorLayout& tensor() const noexcept { return tensor_; }
  [[nodiscard]] std::uint32_t buffer() const noexcept { return buffer_; }
  /// sparse. The Decoder does not check that the parts fit together: the code that makes the tensor does.
  [[nodiscard]] const SparseLayout& sparse() const noexcept { return sparse_; }
  /// array: the layout, which has passed validate() for the bytes of view().
  [[nodiscard]] const ArrayLayout& array() const noexcept { return array_; }
  [[nodiscard]] const ReferenceRecord& reference() const noexcept { return reference_; }
  /// published: the value's buffers, as parts of buffers()[buffer()], which exists if there are parts. They are in
  /// order, disjoint, aligned, and inside that buffer. The caller reads the payload, view(), with another Decoder.
  [[nodiscard]] std::span<const PublishedPart> parts() const noexcept { return parts_; }
  /// record. If schema() is not 0, it stands for the name.
  [[nodiscard]] RecordKind record_kind() const noexcept { return record_kind_; }
  [[nodiscard]] std::string_view record_name() const noexcept { return record_name_; }
  [[nodiscard]] std::uint32_t schema() const noexcept { return schema_; }
  /// pickled: the out-of-band buffers of the pickle, in order.
  struct PickleBuffer {
    ByteView bytes;
    std::optional<std::uint32_t> far;  // the index of the message's buffer that `bytes` is the whole of
    bool read_only = false;
  };
  [[nodiscard]] std::span<const PickleBuffer> pickle_buffers() const noexcept { return pickle_buffers_; }
  /// dtype; layout; memory_format; size.
  [[nodiscard]] DType dtype() const noexcept { return static_cast<DType>(leaf_); }
  [[nodiscard]] LayoutNumber layout() const noexcept { return static_cast<LayoutNumber>(leaf_); }
  [[nodiscard]] MemoryFormatNumber memory_format() const noexcept { return static_cast<MemoryFormatNumber>(leaf_); }
  [[nodiscard]] std::span<const std::int64_t> size() const noexcept { return tensor_.sizes; }

  // ---- raw numbers, texts and wire records, for envelopes
  std::uint8_t raw_u8() { return checked_raw(reader_.get<std::uint8_t>()); }
  std::uint64_t raw_varint() { return checked_raw(reader_.varint()); }
  std::string_view raw_text() { return checked_raw(reader_.text()); }
  template <WireRecord T>
  T raw() {
    return checked_raw(read<T>(reader_));
  }
  /// Reads a count of items of at least `least` bytes each. Fails if the remaining bytes cannot hold them.
  std::uint64_t raw_count(std::size_t least = 1) { return checked_raw(reader_.count(least)); }

  [[nodiscard]] std::span<const Buffer> buffers() const noexcept { return buffers_; }
  [[nodiscard]] bool failed() const noexcept { return failure_ != nullptr; }
  /// Returns Ok, or a ProtocolError that says what was wrong, and at which byte.
  [[nodiscard]] Status status() const;
  /// Fails the Decoder, for an error that the layer above has found in a value. Returns `invalid`.
  Tag fail(const char* why);
  /// Ends the message after its last value: fails if bytes are left over. Returns status().
  Status finish();

 private:
  Tag checked(Tag tag) {
    if (reader_.failed()) [[unlikely]] {
      return fail("ends inside a value");
    }
    return tag;
  }
  template <class T>
  T checked_raw(T value) {
    if (reader_.failed()) [[unlikely]] {
      fail("ends inside its envelope");
    }
    return value;
  }
  /// Begins a container of `count` items of `width` values each.
  Tag enter(Tag tag, std::uint64_t count, std::size_t width, bool may_hold_itself) {
    if (reader_.failed()) [[unlikely]] {
      return fail("ends inside a value");
    }
    if (depth_ >= max_depth) [[unlikely]] {
      return fail("is nested too deep");
    }
    if (count > announceable_ / width) [[unlikely]] {
      return fail("announces more values than it has bytes");
    }
    announceable_ -= count * width;
    count_ = static_cast<std::size_t>(count);
    number_ = numbers_++;
    open_[depth_++] = {number_, may_hold_itself};
    return tag;
  }
  Tag composite(Tag tag);
  Tag read_leaf(Tag tag, std::uint8_t most);
  Tag read_big_integer();
  Tag read_size();
  Tag read_string(Tag tag);
  Tag read_tensor();
  Tag read_sparse();
  Tag read_array();
  Tag read_pickled();
  Tag read_reference();
  Tag read_published();
  Tag read_record();
  Tag read_again();
  void read_dims(Dims& dims);
  bool read_blob(ByteView& view, std::optional<std::uint32_t>& far);

  Reader reader_;
  std::span<const Buffer> buffers_;
  /// The use of a buffer: the bytes of exactly one value, or any number of tensors. Without this check, a short message
  /// that names one large buffer many times could make the receiver copy it many times.
  enum class Use : std::uint8_t { none, bytes, tensors };
  std::vector<Use> uses_;
  std::size_t whole_;
  std::uint64_t announceable_;  // how many values containers may still announce; each takes at least a byte
  std::size_t depth_ = 0;
  std::uint32_t numbers_ = 0;
  const char* failure_ = nullptr;
  std::size_t failed_at_ = 0;
  std::string detail_;

  std::uint32_t number_ = unnumbered;
  std::int64_t integer_ = 0;
  double real_ = 0;
  double imaginary_ = 0;
  ByteView view_;
  std::optional<std::uint32_t> far_;
  bool negative_ = false;
  std::size_t count_ = 0;
  std::uint32_t referred_ = 0;
  std::uint32_t buffer_ = 0;
  TensorLayout tensor_;
  SparseLayout sparse_;
  ArrayLayout array_;
  ReferenceRecord reference_;
  std::vector<PublishedPart> parts_;
  RecordKind record_kind_{};
  std::string_view record_name_;
  std::uint32_t schema_ = 0;
  std::vector<PickleBuffer> pickle_buffers_;
  std::uint8_t leaf_ = 0;
  std::array<Encoder::Open, max_depth> open_;  // the first depth_ are set
};

}  // namespace tensorferry
