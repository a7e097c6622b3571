#include "base/text.h"

#include <algorithm>
#include <charconv>

namespace tensorferry {

void Piece::write(std::int64_t value) {
  text_ = {digits_.data(), std::to_chars(digits_.data(), digits_.data() + digits_.size(), value).ptr};
}

void Piece::write(std::uint64_t value) {
  text_ = {digits_.data(), std::to_chars(digits_.data(), digits_.data() + digits_.size(), value).ptr};
}

std::string fill(std::string_view pattern, std::span<const Piece> pieces) {
  std::size_t bytes = pattern.size();
  for (const auto& piece : pieces) bytes += piece.text().size();
  std::string out;
  out.reserve(bytes);
  for (const auto& piece : pieces) {
    const auto place = pattern.find("{}");
    out.append(pattern.substr(0, place)).append(piece.text());
    pattern.remove_prefix(place + 2);
  }
  return out.append(pattern);
}

std::string hex(std::uint64_t value, std::size_t digits) {
  std::array<char, 16> buffer;
  const auto* const end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, 16).ptr;
  const std::string_view text(buffer.data(), end);
  return std::string(digits - std::min(digits, text.size()), '0').append(text);
}

std::string fixed(double value, int decimals) {
  std::array<char, 400> buffer;  // 1e308 has 309 digits before the point
  const auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::fixed, decimals);
  return {buffer.data(), end.ptr};
}

namespace {

/// A character of UTF-8 text: its code point, and how many bytes it has. 0 bytes: the text does not begin with one.
struct Character {
  char32_t code = 0;
  std::size_t bytes = 0;
};

Character first_of(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  char32_t code = lead & (0x7fU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3fU);
  }
  constexpr std::array<char32_t, 5> least{0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < least[bytes] || code > 0x10ffff || surrogate) return {};
  return {code, bytes};
}

bool is_shown(char32_t code) {
  struct Range {
    char32_t first, last;
  };
  // Controls; marks of direction, line and paragraph separators, characters without width; tags.
  constexpr std::array<Range, 10> hidden{{{0, 0x1f},
                                          {0x7f, 0x9f},
                                          {0xad, 0xad},
                                          {0x61c, 0x61c},
                                          {0x180e, 0x180e},
                                          {0x200b, 0x200f},
                                          {0x2028, 0x202e},
                                          {0x2060, 0x206f},
                                          {0xfeff, 0xfeff},
                                          {0xe0000, 0xe007f}}};
  return std::none_of(hidden.begin(), hidden.end(),
                      [code](const Range& range) { return code >= range.first && code <= range.last; });
}

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  shown.reserve(text.size());
  while (!text.empty()) {
    const auto [code, bytes] = first_of(text);
    if (bytes == 0)
      shown += '?';
    else if (is_shown(code))
      shown.append(text.substr(0, bytes));
    else
      shown += ' ';
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  return shown;
}

}  // namespace tensorferry
