/// The reader of the codec; see codec.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/record.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "rpc/core/codec.h"
#include "rpc/core/layout.h"
#include "rpc/core/reference_id.h"

namespace tensorferry {

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
    value_.number = unnumbered;
    if (reader_.empty()) [[unlikely]] {
      return fail("ends where a value should be");
    }
    const auto first = reader_.get<std::uint8_t>();
    if (first >= short_form::integer) {
      value_.integer = first - short_form::integer_zero;
      return Tag::integer;
    }
    if (first >= short_form::list) return enter(Tag::list, first - short_form::list, 1, true);
    if (first >= short_form::tuple) return enter(Tag::tuple, first - short_form::tuple, 1, false);
    if (first >= short_form::text) {
      value_.view = reader_.raw(first - short_form::text);
      value_.far.reset();
      return checked(Tag::text);
    }
    switch (static_cast<Tag>(first)) {
      case Tag::none:
      case Tag::false_:
      case Tag::true_:
        return static_cast<Tag>(first);
      case Tag::integer: {
        const auto bits = reader_.varint();
        value_.integer = static_cast<std::int64_t>(bits >> 1) ^ -static_cast<std::int64_t>(bits & 1);
        return checked(Tag::integer);
      }
      case Tag::real:
        value_.real = reader_.get<double>();
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
  [[nodiscard]] std::int64_t integer() const noexcept { return value_.integer; }
  /// real, complex.
  [[nodiscard]] double real() const noexcept { return value_.real; }
  [[nodiscard]] double imaginary() const noexcept { return value_.imaginary; }
  /// text, bytes, bytearray: the bytes. big_integer: the magnitude, little-endian. array: the elements. pickled: the
  /// stream. device: its text. published: the payload. The view lies in the payload, or in the buffer far(), which is
  /// in host memory.
  [[nodiscard]] ByteView view() const noexcept { return value_.view; }
  [[nodiscard]] std::string_view text() const noexcept { return text_of(value_.view); }
  /// Returns the index of the buffer that view() is the whole of; nullopt if view() lies in the payload. The caller may
  /// keep the buffer's owner, and so the bytes, without a copy.
  [[nodiscard]] std::optional<std::uint32_t> far() const noexcept { return value_.far; }
  /// big_integer.
  [[nodiscard]] bool negative() const noexcept { return value_.negative; }
  /// The number of values that follow before leave(). tuple, list, set, frozenset: the values. dict: the pairs. record:
  /// the fields. pickled, sparse: the parts. All containers together announce no more values than the payload has
  /// bytes.
  [[nodiscard]] std::size_t count() const noexcept { return value_.count; }
  /// The number of a value that `again` may name later, else `unnumbered`. The caller keeps such values in a table by
  /// number: a list or dict before it reads the values inside, all others when they are complete.
  [[nodiscard]] std::uint32_t number() const noexcept { return value_.number; }
  /// again: the number of a value that has begun before. It is complete, unless it is a list or dict.
  [[nodiscard]] std::uint32_t referred() const noexcept { return value_.referred; }
  /// The count of numbers assigned so far.
  [[nodiscard]] std::uint32_t numbers() const noexcept { return numbers_; }
  /// tensor: a layout that has passed validate() for buffers()[buffer()]. The tensor is on that buffer's device, which
  /// may differ from the layout's.
  [[nodiscard]] const TensorLayout& tensor() const noexcept { return value_.tensor; }
  [[nodiscard]] std::uint32_t buffer() const noexcept { return value_.buffer; }
  /// sparse. The Decoder does not check that the parts fit together: the code that makes the tensor does.
  [[nodiscard]] const SparseLayout& sparse() const noexcept { return value_.sparse; }
  /// array: the layout, which has passed validate() for the bytes of view().
  [[nodiscard]] const ArrayLayout& array() const noexcept { return value_.array; }
  [[nodiscard]] const ReferenceRecord& reference() const noexcept { return value_.reference; }
  /// published: the value's buffers, as parts of buffers()[buffer()], which exists if there are parts. They are in
  /// order, disjoint, aligned, and inside that buffer. The caller reads the payload, view(), with another Decoder.
  [[nodiscard]] std::span<const PublishedPart> parts() const noexcept { return value_.parts; }
  /// record. If schema() is not 0, it stands for the name.
  [[nodiscard]] RecordKind record_kind() const noexcept { return value_.record_kind; }
  [[nodiscard]] std::string_view record_name() const noexcept { return value_.record_name; }
  [[nodiscard]] std::uint32_t schema() const noexcept { return value_.schema; }
  /// pickled: the out-of-band buffers of the pickle, in order.
  struct PickleBuffer {
    ByteView bytes;
    std::optional<std::uint32_t> far;  // the index of the message's buffer that `bytes` is the whole of
    bool read_only = false;
  };
  [[nodiscard]] std::span<const PickleBuffer> pickle_buffers() const noexcept { return value_.pickle_buffers; }
  /// dtype; layout; memory_format; size.
  [[nodiscard]] DType dtype() const noexcept { return static_cast<DType>(value_.leaf); }
  [[nodiscard]] LayoutNumber layout() const noexcept { return static_cast<LayoutNumber>(value_.leaf); }
  [[nodiscard]] MemoryFormatNumber memory_format() const noexcept {
    return static_cast<MemoryFormatNumber>(value_.leaf);
  }
  [[nodiscard]] std::span<const std::int64_t> size() const noexcept { return value_.tensor.sizes; }

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
    value_.count = static_cast<std::size_t>(count);
    value_.number = numbers_++;
    open_[depth_++] = {value_.number, may_hold_itself};
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

  /// What next() has read last: of its tag, the others are of earlier values.
  struct Value {
    std::uint32_t number = unnumbered;
    std::int64_t integer = 0;
    double real = 0;
    double imaginary = 0;
    ByteView view;
    std::optional<std::uint32_t> far;
    bool negative = false;
    std::size_t count = 0;
    std::uint32_t referred = 0;
    std::uint32_t buffer = 0;
    TensorLayout tensor;
    SparseLayout sparse;
    ArrayLayout array;
    ReferenceRecord reference;
    std::vector<PublishedPart> parts;
    RecordKind record_kind{};
    std::string_view record_name;
    std::uint32_t schema = 0;
    std::vector<PickleBuffer> pickle_buffers;
    std::uint8_t leaf = 0;
  };
  Value value_;
  std::array<OpenContainer, max_depth> open_;  // the first depth_ are set
};

}  // namespace tensorferry
