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

}  // namespace tensorferry
