/// Formats error texts and log lines with values in them: the part of std::format (which GCC 12 lacks) that they need.
///
///   formatted("\"{}\" sent {} bytes", peer, bytes)
///
/// Each `{}` stands for the next value: a text, an integer, true or false, or one character. The compiler checks that
/// there are as many `{}` as values. For other forms, hex() and fixed() make texts.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace tensorferry {

/// One value as text. It refers to a text that it is given, but holds digits itself, so it can be neither copied nor
/// moved.
class Piece final {
 public:
  Piece(std::string_view text) : text_(text) {}                    // NOLINT(google-explicit-constructor)
  Piece(const char* text) : text_(text) {}                         // NOLINT(google-explicit-constructor)
  Piece(const std::string& text) : text_(text) {}                  // NOLINT(google-explicit-constructor)
  Piece(bool value) : text_(value ? "true" : "false") {}           // NOLINT(google-explicit-constructor)
  Piece(char value) : digits_{value}, text_(digits_.data(), 1) {}  // NOLINT(google-explicit-constructor)
  template <std::integral T>
  Piece(T value) {  // NOLINT(google-explicit-constructor)
    if constexpr (std::signed_integral<T>) {
      write(static_cast<std::int64_t>(value));
    } else {
      write(static_cast<std::uint64_t>(value));
    }
  }
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;
  [[nodiscard]] std::string_view text() const noexcept { return text_; }

 private:
  void write(std::int64_t value);
  void write(std::uint64_t value);

  std::array<char, 20> digits_{};  // enough for -2^63 and for 2^64 - 1
  std::string_view text_;
};

/// The pattern of a call with `Count` values. A pattern with another number of `{}` does not compile.
template <std::size_t Count>
class Pattern final {
 public:
  template <class Text>
    requires std::convertible_to<const Text&, std::string_view>
  consteval Pattern(const Text& text) : text_(text) {  // NOLINT(google-explicit-constructor)
    std::size_t places = 0;
    for (std::size_t at = text_.find("{}"); at != std::string_view::npos; at = text_.find("{}", at + 2)) ++places;
    if (places != Count) throw "the pattern has another number of {} than there are values";
  }
  [[nodiscard]] constexpr std::string_view text() const noexcept { return text_; }

 private:
  std::string_view text_;
};

/// Replaces each `{}` of `pattern` by the next piece. Only formatted() calls it.
std::string fill(std::string_view pattern, std::span<const Piece> pieces);

template <class... Values>
std::string formatted(Pattern<sizeof...(Values)> pattern, const Values&... values) {
  const std::array<Piece, sizeof...(Values)> pieces{{Piece(values)...}};
  return fill(pattern.text(), pieces);
}

/// Returns `value` in lower-case hexadecimal, with at least `digits` digits.
std::string hex(std::uint64_t value, std::size_t digits = 1);
/// Returns `value` with `decimals` decimals.
std::string fixed(double value, int decimals);

/// Returns UTF-8 text as it may be shown in a terminal, whoever wrote it. A space stands for each character that ends a
/// line, is a control (C0, DEL, C1), changes the direction of what follows or has no width; `?` for each byte that is
/// not UTF-8.
std::string printable(std::string_view text);

/// Returns the values of a range as text, with `separator` between them.
template <class Range>
std::string joined(const Range& values, std::string_view separator) {
  std::string text;
  for (const auto& value : values) {
    if (!text.empty()) text += separator;
    text += Piece(value).text();
  }
  return text;
}

}  // namespace tensorferry
