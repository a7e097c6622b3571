/// Conversion of C++ types to and from the values of arguments and results. A type T can be sent or received if it has
/// a Value<T>:
///
///     bool; integers; float, double     bool, int, float
///     std::complex<double>              complex
///     std::string, string_view, const char*     str (UTF-8)
///     std::vector<std::byte>            bytes      (a bytearray is accepted too)
///     std::vector<T>, std::array<T, n>  list       (a tuple is accepted too)
///     std::tuple, std::pair             tuple      (a list is accepted too)
///     std::map, std::unordered_map      dict
///     std::optional<T>                  None or T
///     Tensor, TensorOf<T>               torch.Tensor
///     Object                            RRef       (tensorferry/object.h)
///     Future<T>                         as a result: T, when it completes (tensorferry/future.h)
///
/// For a type of its own, a program specialises Value<T>. For a struct that takes one line:
///
///     struct Step { Tensor observation; double reward; bool done; };
///     template <>
///     struct tensorferry::Value<Step>
///         : tensorferry::Fields<"Step", &Step::observation, &Step::reward, &Step::done> {};
///
/// Python sees the tuple (observation, reward, done). Any other type is converted to and from a type that has a Value:
///
///     template <>
///     struct tensorferry::Value<Uuid> {
///       static std::string name() { return "Uuid"; }
///       static void write(ValueWriter& out, const Uuid& id) { out.text(id.text()); }
///       static Uuid read(ValueReader& in) { return Uuid::parse(in.text()); }
///     };
#pragma once

#include <algorithm>
#include <array>
#include <complex>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensorferry/tensor.h"

namespace tensorferry {

class Object;
class Encoder;  // the codec; not part of the public interface
class Decoder;
struct Buffer;
namespace detail {
class DeviceTensors;
class ObjectMarshaller;
class Reading;
}  // namespace detail

/// Converts a T to and from one value of a message; see above.
///
/// - `name` returns the type's name for signatures.
/// - `write` writes exactly one value.
/// - `read` reads exactly one value, and throws if it does not fit T.
template <class T>
struct Value;

/// Writes the values of one message, in order. Throws InvalidArgument for a value that cannot be sent. Used by one
/// thread.
class ValueWriter {
 public:
  void none();
  void boolean(bool value);
  void integer(std::int64_t value);
  void unsigned_integer(std::uint64_t value);
  void real(double value);
  void complex(std::complex<double> value);
  void text(std::string_view value);
  void bytes(std::span<const std::byte> value);
  /// Writes a tensor without a copy: its memory is read until the call has completed. A tensor with gaps between its
  /// elements is copied first, in host memory only.
  void tensor(const Tensor& value);
  /// Writes a reference. Throws InvalidArgument if the Object is empty or belongs to another agent of this process, and
  /// the reference's error if its object is lost.
  void object(const Object& value);
  /// Begins a container. The caller writes that many values (for a dict, each key and then its value), then calls
  /// end().
  void begin_tuple(std::size_t values);
  void begin_list(std::size_t values);
  void begin_dict(std::size_t pairs);
  void end();

  /// For the library only: writes into `out`. `marshaller` takes the references; null: a reference is InvalidArgument.
  /// `devices` are those of the agent; null: host memory alone.
  ValueWriter(Encoder& out, detail::ObjectMarshaller* marshaller, const detail::DeviceTensors* devices = nullptr)
      : out_(&out), marshaller_(marshaller), devices_(devices) {}
  [[nodiscard]] Encoder& encoder() const noexcept { return *out_; }
  [[nodiscard]] const detail::DeviceTensors* devices() const noexcept { return devices_; }

 private:
  Encoder* out_;
  detail::ObjectMarshaller* marshaller_;
  const detail::DeviceTensors* devices_;
};

/// Reads the values of one message, in order, and checks them, because the bytes come from a peer. Used by one thread.
///
/// Each function throws if the next value has another type, and the call then fails with InvalidArgument at the caller.
class ValueReader {
 public:
  [[nodiscard]] bool boolean();
  [[nodiscard]] std::int64_t integer();
  [[nodiscard]] std::uint64_t unsigned_integer();
  /// Reads a float, or an int as a float.
  [[nodiscard]] double real();
  /// Reads a complex, a float or an int.
  [[nodiscard]] std::complex<double> complex();
  [[nodiscard]] std::string text();
  /// Reads bytes or a bytearray.
  [[nodiscard]] std::vector<std::byte> bytes();
  /// Reads a dense tensor, or a numpy array in little-endian byte order with a dtype that DType has. The result shares
  /// the message's memory, except for a small numpy array, which is copied. Throws InvalidArgument for a lazily
  /// conjugated or negated tensor. A tensor on a GPU does not fit: its bytes may still be on their way.
  [[nodiscard]] Tensor tensor();
  [[nodiscard]] Object object();
  /// Reads a None and returns true. Returns false, and reads nothing, if the next value is not None.
  [[nodiscard]] bool none();
  /// Begins a tuple, a list or a record. Returns the number of values that follow; the caller reads them all, then
  /// calls leave(). A record is a named tuple, a dataclass or a TensorDict of Python's; its first value is a str with
  /// the names of its fields.
  std::size_t begin_sequence();
  /// Begins a dict. Returns the number of pairs that follow, each a key and then its value.
  std::size_t begin_dict();
  /// Ends a container.
  void leave();
  /// Throws the error of a value that does not fit; `expected` names the expected type.
  [[noreturn]] void mismatch(std::string expected);

  /// For the library only.
  explicit ValueReader(detail::Reading& in) : in_(&in) {}
  [[nodiscard]] detail::Reading& reading() const noexcept { return *in_; }

 private:
  detail::Reading* in_;
};

namespace detail {

template <class T>
inline constexpr bool is_integer_v = std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char>;

template <class... T>
std::string names_of(std::string_view open) {
  std::string out(open);
  std::size_t n = 0;
  ((out += (n++ != 0 ? ", " : "") + Value<T>::name()), ...);
  return out + "]";
}

/// A text that can be a template argument.
template <std::size_t n>
struct Name {
  char text[n];                             // NOLINT(modernize-avoid-c-arrays)
  consteval Name(const char (&given)[n]) {  // NOLINT(google-explicit-constructor,modernize-avoid-c-arrays)
    std::copy_n(given, n, text);
  }
};

template <class>
struct MemberOf;
template <class Struct, class Member>
struct MemberOf<Member Struct::*> {
  using StructType = Struct;
  using MemberType = Member;
};

}  // namespace detail

template <>
struct Value<bool> {
  static std::string name() { return "bool"; }
  static void write(ValueWriter& out, bool value) { out.boolean(value); }
  static bool read(ValueReader& in) { return in.boolean(); }
};

template <class T>
  requires detail::is_integer_v<T>
struct Value<T> {
  static std::string name() { return "int"; }
  static void write(ValueWriter& out, T value) {
    if constexpr (std::unsigned_integral<T> && sizeof(T) == 8) {
      out.unsigned_integer(value);
    } else {
      out.integer(value);
    }
  }
  static T read(ValueReader& in) {
    if constexpr (std::unsigned_integral<T>) {
      const auto value = in.unsigned_integer();
      if (value > std::numeric_limits<T>::max()) in.mismatch(range());
      return static_cast<T>(value);
    } else {
      const auto value = in.integer();
      if (value < std::numeric_limits<T>::min() || value > std::numeric_limits<T>::max()) in.mismatch(range());
      return static_cast<T>(value);
    }
  }

 private:
  static std::string range() {
    return "int from " + std::to_string(std::numeric_limits<T>::min()) + " to " +
           std::to_string(std::numeric_limits<T>::max());
  }
};

template <std::floating_point T>
struct Value<T> {
  static std::string name() { return "float"; }
  static void write(ValueWriter& out, T value) { out.real(static_cast<double>(value)); }
  static T read(ValueReader& in) { return static_cast<T>(in.real()); }
};

template <std::floating_point T>
struct Value<std::complex<T>> {
  static std::string name() { return "complex"; }
  static void write(ValueWriter& out, std::complex<T> value) { out.complex(value); }
  static std::complex<T> read(ValueReader& in) { return std::complex<T>(in.complex()); }
};

template <>
struct Value<std::string> {
  static std::string name() { return "str"; }
  static void write(ValueWriter& out, const std::string& value) { out.text(value); }
  static std::string read(ValueReader& in) { return in.text(); }
};
/// Can only be sent: a view of the bytes of a received message would dangle. A served function may still have a
/// std::string_view parameter, which views a std::string of that call.
template <>
struct Value<std::string_view> {
  static std::string name() { return "str"; }
  static void write(ValueWriter& out, std::string_view value) { out.text(value); }
};
template <>
struct Value<const char*> {
  static std::string name() { return "str"; }
  static void write(ValueWriter& out, const char* value) { out.text(value); }
};
template <>
struct Value<char*> : Value<const char*> {};

template <>
struct Value<std::vector<std::byte>> {
  static std::string name() { return "bytes"; }
  static void write(ValueWriter& out, const std::vector<std::byte>& value) { out.bytes(value); }
  static std::vector<std::byte> read(ValueReader& in) { return in.bytes(); }
};

/// For many numbers a Tensor is far faster.
template <class T>
  requires(!std::same_as<T, std::byte>)
struct Value<std::vector<T>> {
  static std::string name() { return "list[" + Value<T>::name() + "]"; }
  static void write(ValueWriter& out, const std::vector<T>& values) {
    out.begin_list(values.size());
    for (const auto& value : values) Value<T>::write(out, value);
    out.end();
  }
  static std::vector<T> read(ValueReader& in) {
    std::vector<T> out;
    // The count comes from the peer. Each value takes at least one byte of the message, but more than that here.
    auto left = in.begin_sequence();
    out.reserve(std::min<std::size_t>(left, 1024));
    for (; left != 0; --left) out.push_back(Value<T>::read(in));
    in.leave();
    return out;
  }
};

template <class T, std::size_t n>
struct Value<std::array<T, n>> {
  static std::string name() { return "list[" + Value<T>::name() + "] of " + std::to_string(n); }
  static void write(ValueWriter& out, const std::array<T, n>& values) {
    out.begin_list(n);
    for (const auto& value : values) Value<T>::write(out, value);
    out.end();
  }
  static std::array<T, n> read(ValueReader& in) {
    if (in.begin_sequence() != n) in.mismatch(name());
    auto out = read_all(in, std::make_index_sequence<n>());
    in.leave();
    return out;
  }

 private:
  template <std::size_t... i>
  static std::array<T, n> read_all(ValueReader& in, std::index_sequence<i...>) {
    return {((void)i, Value<T>::read(in))...};
  }
};

template <class... T>
struct Value<std::tuple<T...>> {
  static std::string name() { return detail::names_of<T...>("tuple["); }
  static void write(ValueWriter& out, const std::tuple<T...>& values) {
    out.begin_tuple(sizeof...(T));
    std::apply([&](const T&... value) { (Value<T>::write(out, value), ...); }, values);
    out.end();
  }
  static std::tuple<T...> read(ValueReader& in) {
    if (in.begin_sequence() != sizeof...(T)) in.mismatch(name());
    std::tuple<T...> out{Value<T>::read(in)...};  // braces evaluate in order
    in.leave();
    return out;
  }
};

template <class A, class B>
struct Value<std::pair<A, B>> {
  static std::string name() { return detail::names_of<A, B>("tuple["); }
  static void write(ValueWriter& out, const std::pair<A, B>& values) {
    out.begin_tuple(2);
    Value<A>::write(out, values.first);
    Value<B>::write(out, values.second);
    out.end();
  }
  static std::pair<A, B> read(ValueReader& in) {
    if (in.begin_sequence() != 2) in.mismatch(name());
    std::pair<A, B> out{Value<A>::read(in), Value<B>::read(in)};
    in.leave();
    return out;
  }
};

namespace detail {

template <class Map>
struct MapValue {
  using Key = typename Map::key_type;
  using Mapped = typename Map::mapped_type;
  static std::string name() { return names_of<Key, Mapped>("dict["); }
  static void write(ValueWriter& out, const Map& values) {
    out.begin_dict(values.size());
    for (const auto& [key, value] : values) {
      Value<Key>::write(out, key);
      Value<Mapped>::write(out, value);
    }
    out.end();
  }
  static Map read(ValueReader& in) {
    Map out;
    for (auto left = in.begin_dict(); left != 0; --left) {
      auto key = Value<Key>::read(in);
      out.insert_or_assign(std::move(key), Value<Mapped>::read(in));
    }
    in.leave();
    return out;
  }
};

}  // namespace detail

template <class Key, class Mapped, class... Rest>
struct Value<std::map<Key, Mapped, Rest...>> : detail::MapValue<std::map<Key, Mapped, Rest...>> {};
template <class Key, class Mapped, class... Rest>
struct Value<std::unordered_map<Key, Mapped, Rest...>> : detail::MapValue<std::unordered_map<Key, Mapped, Rest...>> {};

template <class T>
struct Value<std::optional<T>> {
  static std::string name() { return Value<T>::name() + " or None"; }
  static void write(ValueWriter& out, const std::optional<T>& value) {
    if (value) {
      Value<T>::write(out, *value);
    } else {
      out.none();
    }
  }
  static std::optional<T> read(ValueReader& in) {
    if (in.none()) return std::nullopt;
    return Value<T>::read(in);
  }
};

template <>
struct Value<Tensor> {
  static std::string name() { return "tensor"; }
  static void write(ValueWriter& out, const Tensor& value) { out.tensor(value); }
  static Tensor read(ValueReader& in) { return in.tensor(); }
};
template <class T>
struct Value<TensorOf<T>> {
  static std::string name() { return std::string(name_of(dtype_v<T>)) + " tensor"; }
  static void write(ValueWriter& out, const TensorOf<T>& value) { out.tensor(value); }
  static TensorOf<T> read(ValueReader& in) {
    auto tensor = in.tensor();
    if (tensor.dtype() != dtype_v<T> || tensor.device().type != DeviceType::cpu) in.mismatch(name());
    return tensor;
  }
};

/// Base of Value<T> for a struct T, which is sent as the tuple of the given members. A list is accepted too. T must
/// have a default constructor.
template <detail::Name type_name, auto first, auto... members>
struct Fields {
  using Struct = typename detail::MemberOf<decltype(first)>::StructType;
  template <auto member>
  using Type = std::remove_cv_t<typename detail::MemberOf<decltype(member)>::MemberType>;

  static std::string name() { return type_name.text; }
  static void write(ValueWriter& out, const Struct& value) {
    out.begin_tuple(1 + sizeof...(members));
    Value<Type<first>>::write(out, value.*first);
    (Value<Type<members>>::write(out, value.*members), ...);
    out.end();
  }
  static Struct read(ValueReader& in) {
    if (in.begin_sequence() != 1 + sizeof...(members)) {
      in.mismatch(detail::names_of<Type<first>, Type<members>...>(name() + " = tuple["));
    }
    Struct out{};
    out.*first = Value<Type<first>>::read(in);
    ((out.*members = Value<Type<members>>::read(in)), ...);
    in.leave();
    return out;
  }
};

/// Satisfied if a T can be a parameter of a served function, or the result of a call.
template <class T>
concept ReadableValue = requires(ValueReader& in) {
  { Value<T>::read(in) } -> std::convertible_to<T>;
  { Value<T>::name() } -> std::convertible_to<std::string>;
};
/// Satisfied if a T can be an argument of a call, or the result of a served function.
template <class T>
concept WritableValue = requires(ValueWriter& out, const T& value) { Value<T>::write(out, value); };

}  // namespace tensorferry
