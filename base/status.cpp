#include "base/status.h"

namespace tensorferry {

std::string_view name_of(Code code) noexcept {
  switch (code) {
    case Code::ok:
      return "Ok";
#define TENSORFERRY_NAME(number, code, Class, ...)                                         \
  static_assert((number) > 0 && (number) < code_count, "error codes are numbered from 1"); \
  case Code::code:                                                                         \
    return #Class;
      TENSORFERRY_ERRORS(TENSORFERRY_NAME)
#undef TENSORFERRY_NAME
  }
  return "Unknown";  // a number that a newer peer sent
}

std::string Status::text() const {
  std::string text(name_of(code()));
  if (!what().empty()) text.append(": ").append(what());
  return text;
}

}  // namespace tensorferry
