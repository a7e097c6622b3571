/// Makes wire records from a fuzzer's input, and checks that records survive encoding and decoding. The declarations of
/// the records (base/record.h) give the structure, as they do for their readers and writers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "base/bytes.h"
#include "base/record.h"
#include "tests/fuzz/must.h"

namespace tensorferry::fuzzing {

/// Fills records from the input. Most fields are within their bounds; a few enums, texts and vectors are slightly
/// beyond. Views in the records point into the input, or into static memory.
class RecordInput {
 public:
  /// Most numbers in the records are less than `usual`.
  explicit RecordInput(Reader& in, unsigned usual = 128) : in_(in), usual_(usual) {}

  template <WireMessage T>
  T make() {
    T message{};
    fill(message, record::ByType());
    return message;
  }
  /// Returns whether all records that were made so far are valid: the reader must accept them.
  [[nodiscard]] bool valid() const { return valid_; }

 private:
  static constexpr auto unbounded = std::numeric_limits<std::size_t>::max();
  /// Sizes around a larger bound are left out: such a record takes seconds.
  static constexpr std::size_t largest_bound = std::size_t{1} << 16;

  template <class T, class Form>
  void fill(T& value, const Form& form) {
    auto most = unbounded;
    if constexpr (std::is_same_v<Form, record::AtMost>) most = form.most;
    if constexpr (std::is_same_v<T, bool>) {
      value = in_.get<std::uint8_t>() % 2 != 0;
    } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::byte> ||
                         std::is_same_v<Form, record::AnyValue>) {
      value = static_cast<T>(number());
    } else if constexpr (std::is_enum_v<T>) {
      const auto choice = in_.get<std::uint8_t>();
      const auto values = static_cast<unsigned>(T::last) + 1;
      value = static_cast<T>(choice == 0xff ? values : choice % values);
      valid_ = valid_ && choice != 0xff;
    } else if constexpr (record::is_bytes<T>) {
      record::assign(value, some_bytes(most));
      valid_ = valid_ && (record::is_text<T> || value.size() <= most);  // the writer cuts a text at its bound
    } else if constexpr (record::is_message<T>) {
      fill_alternative(value);
    } else if constexpr (WireRecord<T>) {
      record::each_field(value, [this](auto& member, const auto& how) { this->fill(member, how); });
      if constexpr (requires { value.valid(); }) valid_ = valid_ && value.valid();
    } else {
      if constexpr (!record::is_array<T>) value.resize(size(most));
      for (auto& element : value) fill(element, record::ByType());
      valid_ = valid_ && value.size() <= most;
    }
  }

  template <class... Alternatives>
  void fill_alternative(std::variant<Alternatives...>& message) {
    auto left = in_.get<std::uint8_t>() % sizeof...(Alternatives);
    const auto fill_as = [&]<class Alternative>() {
      if (left-- != 0) return false;
      this->fill(message.template emplace<Alternative>(), record::ByType());
      return true;
    };
    (void)(fill_as.template operator()<Alternatives>() || ...);
  }

  /// Returns a usual number, one of any 64 bits, or a power of two.
  std::uint64_t number() {
    const auto choice = in_.get<std::uint8_t>();
    if (choice < 128) return choice % usual_;
    return choice < 192 ? in_.get<std::uint64_t>() : std::uint64_t{1} << (choice - 192);
  }
  /// Returns a small size, or one around the bound.
  std::size_t size(std::size_t most) {
    const auto choice = in_.get<std::uint8_t>();
    return choice < 252 || most > largest_bound ? choice % 16U : most + choice - 253;
  }
  ByteView some_bytes(std::size_t most) {
    static const std::string filler(std::size_t{64} << 10, 'x');
    const auto bytes = size(most);
    if (bytes < 16) return in_.raw(std::min(bytes, in_.rest().size()));
    return view_of(std::string_view(filler).substr(0, bytes));
  }

  Reader& in_;
  const unsigned usual_;
  bool valid_ = true;
};

/// Makes a record and encodes it. Aborts unless the reader accepts the bytes if and only if the record is valid, and
/// the writer then gives the same bytes.
template <WireMessage T>
Bytes record_from(Reader& in) {
  RecordInput input(in);
  auto bytes = tensorferry::encode(input.make<T>());
  const auto decoded = tensorferry::decode<T>(bytes);
  must(decoded.has_value() == input.valid() && (!decoded || tensorferry::encode(*decoded) == bytes));
  return bytes;
}

/// Aborts if `input` is a record that does not survive encoding and decoding. The input may differ from the encoded
/// bytes, because a varint has several encodings.
template <WireMessage T>
void round_trip(ByteView input) {
  const auto once = tensorferry::decode<T>(input);
  if (!once) return;
  const auto bytes = tensorferry::encode(*once);
  const auto twice = tensorferry::decode<T>(bytes);
  must(twice && tensorferry::encode(*twice) == bytes);
}

/// Returns a message of a hostile peer: a record that the input fills if `well_formed`, else bytes of the input.
template <WireMessage T>
Bytes message_from(Reader& in, bool well_formed) {
  if (well_formed) return record_from<T>(in);
  const auto bytes = in.sized();
  round_trip<T>(bytes);
  return {bytes.begin(), bytes.end()};
}

/// Reads the input as a record of each type, and makes a record of each type from it.
template <WireMessage... Types>
void fuzz_records(ByteView input) {
  const auto fuzz = [input]<class T>() {
    round_trip<T>(input);
    Reader in(input);
    (void)record_from<T>(in);
  };
  (fuzz.template operator()<Types>(), ...);
}

}  // namespace tensorferry::fuzzing
