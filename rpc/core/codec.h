/// Values as bytes: the compact codec of arguments and results. docs/codec.md has it byte by byte.
///
/// `Encoder` and `Decoder` know the stream, not the language: the layer above walks its own objects (Python's, C++'s)
/// and calls one function a value. A type arrives as the type it was, so the caller maps exact types alone (bool is no
/// int; an instance of a subclass of dict is no dict) and sends everything else as `pickled` or `record`.
///
/// What is large does not go through the stream: tensors, arrays, pickle's out-of-band buffers, and strings above
/// `inline_limit` travel as buffers beside it.
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
#include "base/bytes.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "rpc/core/identity_map.h"
#include "rpc/core/layout.h"
#include "rpc/core/reference_id.h"

namespace tensorferry {

/// What a value is. Numbers travel: never renumber. First bytes from 0x40 on are short forms (see docs/codec.md), which
/// the Decoder reports by these tags too.
enum class Tag : std::uint8_t {
  none = 0x00,
  false_ = 0x01,
  true_ = 0x02,
  integer = 0x03,      // 64 bits, signed
  big_integer = 0x04,  // beyond
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
  again = 0x1a,          // an object that this message has held before
  published = 0x1b,      // a value that was encoded on its own, for many (published.h)
  invalid = 0x3f,        // never on the wire: the Decoder failed
};

/// Longer strings, byte strings and arrays travel as buffers: beyond this size the two copies through the stream cost
/// more than a buffer's record in the frame and its acknowledgement.
inline constexpr std::size_t inline_limit = 8 * 1024;
/// Payloads are shorter: values are numbered in 32 bits.
inline constexpr std::size_t longest_payload = 0xffffffff;
/// Values nested deeper are refused by both ends: the layers above recurse.
inline constexpr std::size_t max_depth = 200;

enum class RecordKind : std::uint8_t { named_tuple = 0, dataclass = 1, structure = 2 };

/// Where the bytes of one buffer of a published value lie in the one that came.
struct PublishedPart {
  static constexpr std::size_t alignment = 64;  // of `offset`
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// How torch.layout and torch.memory_format travel.
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

/// Writes values into one message. Not thread-safe; used once.
///
/// Identity: objects that a message may hold twice are numbered by both ends in the order in which they begin: tuples,
/// lists, dicts, sets, frozensets, bytearrays, tensors, sparse tensors, arrays, pickled values, references, records,
/// and strings that go out of band. The caller asks `again(address)` first where more than one holder can exist (in
/// Python: a reference count above 1), and passes the same address as `identity` when it is new; null is "cannot come
/// again". Addresses must stay taken until `take()`: a temporary's would be found again by a stranger.
///
/// Errors are sticky: status() gives the first one before take(); what is written after it does not matter.
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
  /// Always in the stream: for names and other short text.
  void text(std::string_view value) {
    if (value.size() <= most_short_text) {
      auto& at = room(1 + most_short_text);
      *at++ = static_cast<std::byte>(short_text + value.size());
      put_raw(at, value.data(), value.size());
    } else {
      long_text(value);
    }
  }
  /// In the stream up to `inline_limit`, else as a buffer: then `owner()` is called, once, for what keeps it alive.
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

  // ---- containers: begin, the values, end. False: too deep (or failed before); then no values and no end.
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
  /// `pairs` times a key, then its value.
  bool begin_dict(std::size_t pairs, const void* identity = nullptr) { return begin(Tag::dict, pairs, identity, true); }
  bool begin_set(std::size_t values, const void* identity = nullptr) {
    return begin(Tag::set, values, identity, false);
  }
  bool begin_frozenset(std::size_t values, const void* identity = nullptr) {
    return begin(Tag::frozenset, values, identity, false);
  }
  /// `fields` values follow. `schema` names what they belong to ("module:qualname"), or stands for a number that both
  /// ends agreed on where it is not 0 (then the name is not sent).
  bool begin_record(RecordKind kind, std::string_view name, std::uint32_t schema, std::size_t fields,
                    const void* identity = nullptr);
  /// Something pickled: `stream` is protocol 5, `buffers` what it left out of band, and `parts` values follow that its
  /// persistent ids count off (tensors and references, which do not go through pickle).
  struct PickleBuffer {
    ByteView bytes;
    bool read_only = false;
    Owner owner;  // kept only where the buffer goes out of band
  };
  bool begin_pickled(ByteView stream, Owner stream_owner, std::span<const PickleBuffer> buffers, std::size_t parts,
                     const void* identity = nullptr);
  /// layout.parts() tensors follow.
  bool begin_sparse(const SparseLayout& layout, const void* identity = nullptr);
  void end() { --depth_; }

  // ---- what has buffers
  /// So many buffers are to be expected.
  void expect_buffers(std::size_t count) {
    buffers_.reserve(count);
    destinations_.reserve(count);
  }
  /// Adds a buffer that tensors can lie in.
  std::uint32_t add_buffer(Buffer buffer, Destination destination) {
    buffers_.push_back(std::move(buffer));
    destinations_.push_back(destination);
    return static_cast<std::uint32_t>(buffers_.size() - 1);
  }
  /// The same for a buffer that is handed over, not copied.
  std::uint32_t add_shared_buffer(Buffer buffer, Device device, Sharing sharing = Sharing::shared) {
    const auto index = add_buffer(std::move(buffer), {device});
    sharing_.resize(index + 1, Sharing::by_value);
    sharing_[index] = sharing;
    return index;
  }
  /// The buffer of a storage that was added before under this address, so that tensors which share it go on sharing.
  [[nodiscard]] std::optional<std::uint32_t> storage(const void* address) const { return storages_.find(address); }
  void remember_storage(const void* address, std::uint32_t buffer) { storages_.insert(address, buffer); }
  /// `layout` must pass validate() for that buffer (a layout that does not is a bug of the caller's: Internal).
  void tensor(const TensorLayout& layout, std::uint32_t buffer, const void* identity = nullptr);
  /// `elements` must be contiguous as `layout` says.
  template <class MakeOwner>
  void array(const ArrayLayout& layout, ByteView elements, MakeOwner&& owner, const void* identity = nullptr) {
    put_array(layout, identity);
    if (elements.size() <= inline_limit) return put_near(elements);
    put_far(elements, owner());
  }
  void reference(const ReferenceRecord& record, const void* identity = nullptr);
  /// A payload that was taken from another Encoder, the parts of `region` that are its buffers, and the region, which
  /// goes to receivers as frozen memory (no buffer where there are no parts).
  void published(ByteView payload, std::span<const PublishedPart> parts, const Buffer& region,
                 const void* identity = nullptr);

  // ---- identity
  /// True: the object is in this message already and a back-reference is written; nothing more to do for it. A tuple,
  /// set, frozenset, record, sparse or pickled value that holds itself cannot be built from the outside in: that fails
  /// the message (pickle the whole instead).
  bool again(const void* identity) {
    const auto number = seen_.find(identity);
    return number ? put_again(*number) : false;
  }

  // ---- outside of values, for envelopes
  void raw_u8(std::uint8_t value) { *room(1)++ = static_cast<std::byte>(value); }
  void raw_u64(std::uint64_t value) { put_raw(room(sizeof value), &value, sizeof value); }
  void raw_varint(std::uint64_t value) { put_varint(room(max_varint), value); }
  void raw_text(std::string_view value);  // length, then the bytes

  // ---- the result
  [[nodiscard]] bool failed() const noexcept { return failure_ != nullptr; }
  /// Ok, or why this cannot be sent: InvalidArgument (a fault of the value's), Internal (of the caller's).
  [[nodiscard]] Status status() const;
  [[nodiscard]] std::size_t size() const noexcept { return static_cast<std::size_t>(at_ - bytes_.data()); }
  /// The message: payload, buffers, destinations. Once, and only where status() is ok.
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
  static constexpr std::uint8_t tensor_has_offset = 0x20;  // beside TensorLayout::Flag
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

  /// Where to write up to `bytes` more.
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

  std::byte* at_ = nullptr;   // the next byte
  std::byte* end_ = nullptr;  // of bytes_, which is as large as its capacity until take()
  Bytes bytes_;
  std::vector<Buffer> buffers_;
  std::vector<Destination> destinations_;
  std::vector<Sharing> sharing_;  // as Message has it
  IdentityMap seen_;
  IdentityMap storages_;
  std::uint32_t numbers_ = 0;
  std::size_t depth_ = 0;
  const char* failure_ = nullptr;
  Code failure_code_ = Code::ok;
  struct Open {
    std::uint32_t number;
    bool may_hold_itself;  // list and dict: they exist before their values do
  };
  std::array<Open, max_depth> open_;  // around the next value; the first depth_ are set
};

/// Reads a payload value by value: `next()` says what comes and reads all of it but the values inside; the getters then
/// give what it read, until the next `next()`. Not thread-safe.
///
/// The bytes are a peer's. Every length, count, number and layout is checked before it is given out; containers cannot
/// announce more values than there are bytes; nesting ends at `max_depth`. After a failure `next()` gives `invalid` for
/// good, so a caller stops at the first `invalid` and looks at `status()` once.
///
/// Payload and buffers stay as they are until the Decoder and what it gave out are gone.
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
  /// After the last value of a tuple, list, dict, set, frozenset, record, pickled or sparse (also where it has none).
  void leave() {
    if (depth_ != 0) --depth_;
  }
  /// Reads one value with all that it holds and gives nothing out. False: failed.
  bool skip();

  // ---- what next() read
  /// integer.
  [[nodiscard]] std::int64_t integer() const noexcept { return integer_; }
  /// real, complex.
  [[nodiscard]] double real() const noexcept { return real_; }
  [[nodiscard]] double imaginary() const noexcept { return imaginary_; }
  /// text, bytes, bytearray; the magnitude of a big_integer (little-endian); the elements of an array; pickled: the
  /// stream; device: its text. Lies in the payload, or in buffer far() (always in host memory).
  [[nodiscard]] ByteView view() const noexcept { return view_; }
  [[nodiscard]] std::string_view text() const noexcept { return text_of(view_); }
  /// Where view() is a whole buffer: which. Its owner may be taken to keep the bytes without a copy.
  [[nodiscard]] std::optional<std::uint32_t> far() const noexcept { return far_; }
  /// big_integer.
  [[nodiscard]] bool negative() const noexcept { return negative_; }
  /// Values that follow before leave(): tuple, list, set, frozenset; dict: pairs; record: fields; pickled and sparse:
  /// parts. Never more than the payload has bytes left, over all containers together.
  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  /// The number of a value that can come `again`, else `unnumbered`; the caller keeps each in a table under its number:
  /// lists and dicts at once, before their values; all others when they are complete.
  [[nodiscard]] std::uint32_t number() const noexcept { return number_; }
  /// again: the number of a value that began before, and (unless a list or dict) is complete.
  [[nodiscard]] std::uint32_t referred() const noexcept { return referred_; }
  /// Numbers given out so far.
  [[nodiscard]] std::uint32_t numbers() const noexcept { return numbers_; }
  /// tensor: a layout that validate() has passed for buffers[buffer()]. Which device that buffer is on is the buffer's
  /// to say (it may have landed elsewhere than layout.device).
  [[nodiscard]] const TensorLayout& tensor() const noexcept { return tensor_; }
  [[nodiscard]] std::uint32_t buffer() const noexcept { return buffer_; }
  /// sparse: the parts' own layouts agree with nothing yet; who builds the tensor checks its invariants.
  [[nodiscard]] const SparseLayout& sparse() const noexcept { return sparse_; }
  /// array: elements in view(), exactly as many as it says.
  [[nodiscard]] const ArrayLayout& array() const noexcept { return array_; }
  [[nodiscard]] const ReferenceRecord& reference() const noexcept { return reference_; }
  /// published: view() is the payload, for a Decoder of its own; these are its buffers in buffers()[buffer()] (which is
  /// there where there are parts): in order, apart, aligned, and all inside.
  [[nodiscard]] std::span<const PublishedPart> parts() const noexcept { return parts_; }
  /// record. A name or, not 0, a schema's number.
  [[nodiscard]] RecordKind record_kind() const noexcept { return record_kind_; }
  [[nodiscard]] std::string_view record_name() const noexcept { return record_name_; }
  [[nodiscard]] std::uint32_t schema() const noexcept { return schema_; }
  /// pickled: what was out of band, in order.
  struct PickleBuffer {
    ByteView bytes;
    std::optional<std::uint32_t> far;  // the buffer that `bytes` is the whole of
    bool read_only = false;
  };
  [[nodiscard]] std::span<const PickleBuffer> pickle_buffers() const noexcept { return pickle_buffers_; }
  /// dtype; layout; memory_format; size.
  [[nodiscard]] DType dtype() const noexcept { return static_cast<DType>(leaf_); }
  [[nodiscard]] LayoutNumber layout() const noexcept { return static_cast<LayoutNumber>(leaf_); }
  [[nodiscard]] MemoryFormatNumber memory_format() const noexcept { return static_cast<MemoryFormatNumber>(leaf_); }
  [[nodiscard]] std::span<const std::int64_t> size() const noexcept { return tensor_.sizes; }

  // ---- outside of values, for envelopes
  std::uint8_t raw_u8() { return checked_raw(reader_.get<std::uint8_t>()); }
  std::uint64_t raw_u64() { return checked_raw(reader_.get<std::uint64_t>()); }
  std::uint64_t raw_varint() { return checked_raw(reader_.varint()); }
  std::string_view raw_text() { return checked_raw(reader_.text()); }
  /// A count of things of at least `least` bytes each, checked against what is left.
  std::uint64_t raw_count(std::size_t least = 1) { return checked_raw(reader_.count(least)); }

  [[nodiscard]] std::span<const Buffer> buffers() const noexcept { return buffers_; }
  [[nodiscard]] bool failed() const noexcept { return failure_ != nullptr; }
  /// ProtocolError, with what was wrong and where.
  [[nodiscard]] Status status() const;
  /// The layer above found something wrong in a value (a name that is none, a key that cannot be one).
  Tag fail(const char* why);
  /// After the last value: fails where bytes are left over.
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
  /// `count` times `width` values follow.
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
  /// A buffer holds the bytes of one string or array, or of tensors (many may lie in it): else a few bytes that name
  /// one large buffer again and again would have the receiver copy it as often.
  enum class Use : std::uint8_t { none, bytes, tensors };
  std::vector<Use> uses_;
  std::size_t whole_;
  std::uint64_t announceable_;  // values that containers may still announce: each takes a byte
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
