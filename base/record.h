/// Declares wire records: a struct names its fields once, and its reader, its writer and its bounds follow.
///
///     struct Segment {
///       static constexpr std::uint8_t tag = 3;  // optional: this byte travels in front of the fields
///       std::uint32_t slot = 0;
///       std::string name;
///       static constexpr std::tuple fields{varint(&Segment::slot), at_most(&Segment::name, 64)};
///       [[nodiscard]] bool valid() const { return slot < most_slots; }  // optional: bounds that the reader enforces
///     };
///     using Message = std::variant<Hello, Segment>;  // all have tags: the reader finds the alternative by its tag
///
/// How a field travels follows from its type, unless it is wrapped in varint(), at_most(), any_value() or rest():
/// - numbers, enums: little-endian in their width; an enum needs an enumerator `last`, and the reader refuses more;
/// - bool: a byte, 0 or 1;
/// - texts and bytes: their length as a varint, then the bytes; views point into the bytes that were read;
/// - std::array: its elements; std::vector: their number as a varint, then the elements;
/// - records, and variants of records: their fields.
///
/// A struct without members needs no `fields`. All functions are pure, and reading never throws for what a peer sent.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/bytes.h"

namespace tensorferry {

/// The fields of a struct that cannot name them itself, such as one of a public header: a specialization has them.
template <class T>
inline constexpr std::nullptr_t fields_of = nullptr;

template <class T>
concept NamesFields = requires { T::fields; } || requires { std::get<0>(fields_of<T>); };
template <class T>
concept WireRecord = std::is_class_v<T> && (std::is_empty_v<T> || NamesFields<T>);

namespace record {

template <class T>
inline constexpr bool is_array = false;
template <class T, std::size_t size>
inline constexpr bool is_array<std::array<T, size>> = true;

template <class T>
inline constexpr bool is_message = false;
template <WireRecord... Alternatives>
inline constexpr bool is_message<std::variant<Alternatives...>> = true;

template <class T>
inline constexpr bool is_text = std::is_same_v<T, std::string> || std::is_same_v<T, std::string_view>;
template <class T>
inline constexpr bool is_bytes = is_text<T> || std::is_same_v<T, Bytes> || std::is_same_v<T, ByteView>;

inline ByteView bytes_of(std::string_view text) { return view_of(text); }
inline ByteView bytes_of(ByteView bytes) { return bytes; }
template <class T>
void assign(T& value, ByteView bytes) {
  if constexpr (is_text<T>) {
    value = text_of(bytes);
  } else {
    value = T(bytes.begin(), bytes.end());
  }
}

/// Returns the fewest bytes that a value of this type takes.
template <class T>
constexpr std::size_t least();
template <class T>
void write_value(Writer& out, const T& value);
template <class T>
void read_value(Reader& in, T& value, std::uint64_t most = std::numeric_limits<std::uint64_t>::max());

struct ByType {
  template <class T>
  static constexpr std::size_t least() {
    return record::least<T>();
  }
  void write(Writer& out, const auto& value) const { write_value(out, value); }
  void read(Reader& in, auto& value) const { read_value(in, value); }
};

struct Varint {
  template <std::unsigned_integral T>
  static constexpr std::size_t least() {
    return 1;
  }
  void write(Writer& out, std::uint64_t value) const { out.varint(value); }
  template <std::unsigned_integral T>
  void read(Reader& in, T& value) const {
    const auto number = in.varint();
    if (number > std::numeric_limits<T>::max()) in.fail();
    value = static_cast<T>(number);
  }
};

struct AtMost : ByType {
  std::size_t most = 0;
  explicit constexpr AtMost(std::size_t elements) : most(elements) {}

  template <class T>
  void write(Writer& out, const T& value) const {
    if constexpr (is_text<T>) {
      out.sized(std::string_view(value).substr(0, most));
    } else {
      write_value(out, value);
    }
  }
  void read(Reader& in, auto& value) const { read_value(in, value, most); }
};

struct AnyValue : ByType {
  template <class T>
    requires std::is_enum_v<T>
  void read(Reader& in, T& value) const {
    value = static_cast<T>(in.get<std::underlying_type_t<T>>());
  }
};

struct Rest {
  template <class>
  static constexpr std::size_t least() {
    return 0;
  }
  void write(Writer& out, const auto& value) const { out.raw(bytes_of(value)); }
  void read(Reader& in, auto& value) const { assign(value, in.raw(in.rest().size())); }
};

/// A member, and how it travels.
template <class Class, class T, class Form>
struct Field {
  T Class::*member;
  Form form;
  static constexpr std::size_t least() { return Form::template least<T>(); }
};
template <class Class, class T>
constexpr Field<Class, T, ByType> field(T Class::*member) {
  return {member, {}};
}
template <class Class, class T, class Form>
constexpr Field<Class, T, Form> field(const Field<Class, T, Form>& made) {
  return made;
}

/// Returns the fields of a record.
template <class T>
constexpr auto fields() {
  const auto as_fields = [](const auto&... each) { return std::tuple(field(each)...); };
  if constexpr (std::is_empty_v<T>) {
    return std::tuple();
  } else if constexpr (requires { T::fields; }) {
    return std::apply(as_fields, T::fields);
  } else {
    return std::apply(as_fields, fields_of<T>);
  }
}
/// Calls `visit(member, form)` for each field of a record, in order.
template <class Record, class Visit>
void each_field(Record& value, Visit visit) {
  std::apply([&](const auto&... each) { (visit(value.*each.member, each.form), ...); },
             fields<std::remove_const_t<Record>>());
}

template <class T>
constexpr std::size_t least() {
  if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
    return sizeof(T);
  } else if constexpr (is_array<T>) {
    return std::tuple_size_v<T> * least<typename T::value_type>();
  } else if constexpr (WireRecord<T>) {
    const auto tag = requires { T::tag; } ? 1U : 0U;
    return std::apply([&](const auto&... each) { return (tag + ... + each.least()); }, fields<T>());
  } else {
    return 1;  // a length, or a tag
  }
}

template <class T>
void write_value(Writer& out, const T& value) {
  if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
    out.put(value);
  } else if constexpr (is_bytes<T>) {
    out.sized(value);
  } else if constexpr (is_message<T>) {
    std::visit([&](const auto& alternative) { write_value(out, alternative); }, value);
  } else if constexpr (WireRecord<T>) {
    if constexpr (requires { T::tag; }) out.put(std::uint8_t{T::tag});
    each_field(value, [&](const auto& member, const auto& form) { form.write(out, member); });
  } else {
    if constexpr (!is_array<T>) out.varint(value.size());
    for (const auto& element : value) write_value(out, element);
  }
}

template <class... Alternatives>
constexpr bool tags_differ() {
  const std::array<std::uint8_t, sizeof...(Alternatives)> tags{Alternatives::tag...};
  for (std::size_t i = 0; i < tags.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (tags[i] == tags[j]) return false;
    }
  }
  return true;
}

template <class... Alternatives>
void read_message(Reader& in, std::variant<Alternatives...>& message) {
  static_assert(tags_differ<Alternatives...>());
  const auto tag = in.rest().empty() ? 0 : std::to_integer<std::uint8_t>(in.rest().front());
  const auto read_as = [&]<class Alternative>() {
    if (tag != Alternative::tag) return false;
    read_value(in, message.template emplace<Alternative>());
    return true;
  };
  if (!(read_as.template operator()<Alternatives>() || ...)) in.fail();
}

template <class T>
void read_value(Reader& in, T& value, [[maybe_unused]] std::uint64_t most) {
  if constexpr (std::is_same_v<T, bool>) {
    value = in.flag();
  } else if constexpr (std::is_arithmetic_v<T>) {
    value = in.get<T>();
  } else if constexpr (std::is_same_v<T, std::byte>) {
    value = std::byte{in.get<std::uint8_t>()};
  } else if constexpr (std::is_enum_v<T>) {
    const auto number = in.get<std::underlying_type_t<T>>();
    if (number > static_cast<std::underlying_type_t<T>>(T::last)) return in.fail();
    value = static_cast<T>(number);
  } else if constexpr (is_bytes<T>) {
    const auto bytes = in.sized();
    if (bytes.size() > most) return in.fail();
    assign(value, bytes);
  } else if constexpr (is_message<T>) {
    read_message(in, value);
  } else if constexpr (WireRecord<T>) {
    if constexpr (requires { T::tag; }) {
      if (in.get<std::uint8_t>() != T::tag) in.fail();
    }
    each_field(value, [&](auto& member, const auto& form) { form.read(in, member); });
    if constexpr (requires { value.valid(); }) {
      if (!value.valid()) in.fail();
    }
  } else if constexpr (is_array<T>) {
    for (auto& element : value) read_value(in, element);
  } else {
    static_assert(least<typename T::value_type>() > 0, "else no count of them would be too great");
    const auto count = in.count(least<typename T::value_type>());
    if (count > most) return in.fail();
    value.clear();
    for (std::uint64_t i = 0; i < count && !in.failed(); ++i) read_value(in, value.emplace_back());
  }
}

}  // namespace record

/// Declares an unsigned number that travels as a varint. The reader refuses a number that the member cannot hold.
template <class Class, std::unsigned_integral T>
constexpr record::Field<Class, T, record::Varint> varint(T Class::*member) {
  return {member, {}};
}
/// Declares a text or a vector with a bound that the reader enforces. The writer cuts a text at the bound.
template <class Class, class T>
  requires requires(T value) { value.size(); }
constexpr record::Field<Class, T, record::AtMost> at_most(T Class::*member, std::size_t most) {
  return {member, record::AtMost(most)};
}
/// Declares an enum whose values the reader does not check.
template <class Class, class T>
constexpr record::Field<Class, T, record::AnyValue> any_value(T Class::*member) {
  return {member, {}};
}
/// Declares a text or bytes that take all the bytes up to the end. Only the last field can.
template <class Class, class T>
constexpr record::Field<Class, T, record::Rest> rest(T Class::*member) {
  return {member, {}};
}

/// A record, or a variant of records that all have tags.
template <class T>
concept WireMessage = WireRecord<T> || record::is_message<T>;

/// Appends a record.
template <WireMessage T>
void write(Writer& out, const T& message) {
  record::write_value(out, message);
}
/// Reads a record. If the bytes are not such a record, or a bound does not hold, `in` has failed afterwards.
template <WireMessage T>
T read(Reader& in) {
  T message{};
  record::read_value(in, message);
  return message;
}

template <WireMessage T>
[[nodiscard]] Bytes encode(const T& message) {
  Bytes bytes;
  bytes.reserve(record::least<T>() + 32);
  Writer out(bytes);
  write(out, message);
  return bytes;
}
/// Decodes a record that takes all of `bytes`. Returns nullopt if they are malformed or longer than the record.
template <WireMessage T>
[[nodiscard]] std::optional<T> decode(ByteView bytes) {
  Reader in(bytes);
  std::optional<T> message(read<T>(in));
  if (in.failed() || !in.empty()) message.reset();
  return message;
}

}  // namespace tensorferry
