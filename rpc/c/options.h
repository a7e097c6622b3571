/// Options as names and values, both texts.
#pragma once

#include <charconv>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensorferry/errors.h"

namespace tensorferry::c {

/// Sets an option to a value; false: the value makes no sense.
using SetOption = std::function<bool(std::string_view)>;

inline SetOption text_into(std::string& option) {
  return [&](std::string_view text) {
    option = text;
    return true;
  };
}
template <std::integral T>
SetOption integer_into(T& option) {
  return [&](std::string_view text) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), option);
    return error == std::errc() && end == text.data() + text.size();
  };
}
inline SetOption seconds_into(std::chrono::milliseconds& option) {
  return [&](std::string_view text) {
    double seconds = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
    if (error != std::errc() || end != text.data() + text.size() || !(seconds >= 0) || seconds > 1e9) return false;
    option = std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
    return true;
  };
}
inline SetOption boolean_into(bool& option) {
  return [&](std::string_view text) {
    option = text == "true";
    return option || text == "false";
  };
}

/// Sets the options that `given` names: `count` names and values, in turn. Throws InvalidArgument for an unknown name,
/// and for a value that makes no sense.
inline void read_options(const char* const* given, std::size_t count,
                         const std::vector<std::pair<std::string_view, SetOption>>& table) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::string_view name = given[2 * i];
    const std::string_view value = given[2 * i + 1];
    const SetOption* found = nullptr;
    for (const auto& [known, set] : table) {
      if (known == name) found = &set;
    }
    if (found == nullptr) throw InvalidArgument("there is no option \"" + std::string(name) + "\"");
    if (!(*found)(value)) {
      throw InvalidArgument("\"" + std::string(value) + "\" is no value of the option \"" + std::string(name) + "\"");
    }
  }
}

}  // namespace tensorferry::c
