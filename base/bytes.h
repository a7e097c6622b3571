/// Little-endian writing and bounds-checked reading of bytes. All code that parses bytes from a peer uses `Reader`.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tensorferry {

using Bytes = std::vector<std::byte>;
using ByteView = std::span<const std::byte>;

static_assert(std::endian::native == std::endian::little,
              "the wire format is little-endian; big-endian hosts need swaps here");

inline ByteView view_of(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }
inline std::string_view text_of(ByteView bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

/// Appends to a `Bytes` that the caller owns.
class Writer {
 public:
  explicit Writer(Bytes& out) : out_(&out) {}

  template <class T>
    requires std::integral<T> || std::floating_point<T> || std::is_enum_v<T>
  void put(T value) {
    const auto at = out_->size();
    out_->resize(at + sizeof value);
    std::memcpy(out_->data() + at, &value, sizeof value);
  }
  void raw(ByteView bytes) { out_->insert(out_->end(), bytes.begin(), bytes.end()); }
  /// Appends `value` as unsigned LEB128.
  void varint(std::uint64_t value) {
    while (value >= 0x80) {
      put(static_cast<std::uint8_t>(value | 0x80));
      value >>= 7;
    }
    put(static_cast<std::uint8_t>(value));
  }
  /// Appends the length as a varint, then the bytes.
  void sized(ByteView bytes) {
    varint(bytes.size());
    raw(bytes);
  }
  void sized(std::string_view text) { sized(view_of(text)); }
  [[nodiscard]] std::size_t size() const { return out_->size(); }
  [[nodiscard]] Bytes& bytes() { return *out_; }

 private:
  Bytes* out_;
};

/// Reads from bytes that the caller keeps alive and that no other thread or process can write. A read past the end
/// returns zero or an empty view and makes `failed()` true for good. So a parser checks once at its end, and also
/// before any loop whose count it has read, unless it read that by `count(least)`.
class Reader {
 public:
  explicit Reader(ByteView bytes) : left_(bytes) {}

  template <class T>
    requires std::integral<T> || std::floating_point<T>
  T get() {
    T value{};
    const auto bytes = raw(sizeof value);
    if (bytes.size() == sizeof value) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  ByteView raw(std::uint64_t bytes) {
    if (bytes > left_.size()) {
      fail();
      return {};
    }
    const auto out = left_.first(bytes);
    left_ = left_.subspan(bytes);
    return out;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = get<std::uint8_t>();
      if (shift == 63 && byte > 1) break;  // more than 64 bits
      value |= std::uint64_t{byte & 0x7fU} << shift;
      if (byte < 0x80) return value;
    }
    fail();
    return 0;
  }
  /// Reads a byte that must be 0 or 1.
  bool flag() {
    const auto value = get<std::uint8_t>();
    if (value > 1) fail();
    return value == 1;
  }
  ByteView sized() { return raw(varint()); }
  std::string_view text() { return text_of(sized()); }
  /// Reads a count of elements that take at least `least` bytes each. Fails if the remaining bytes cannot hold them
  /// all.
  std::uint64_t count(std::size_t least = 1) {
    const auto n = varint();
    if (n > left_.size() / least) {
      fail();
      return 0;
    }
    return n;
  }
  void fail() {
    failed_ = true;
    left_ = {};
  }
  [[nodiscard]] bool failed() const { return failed_; }
  [[nodiscard]] bool empty() const { return left_.empty(); }
  [[nodiscard]] ByteView rest() const { return left_; }

 private:
  ByteView left_;
  bool failed_ = false;
};

}  // namespace tensorferry
