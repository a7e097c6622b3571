#include "rpc/core/envelope.h"

namespace tensorferry {

std::optional<FunctionName> parse_function(std::string_view name) {
  if (name.starts_with("py:")) {
    const auto rest = name.substr(3);
    const auto colon = rest.find(':');
    if (colon == 0 || colon == std::string_view::npos || colon + 1 == rest.size()) return std::nullopt;
    return FunctionName{FunctionKind::python, rest.substr(0, colon), rest.substr(colon + 1)};
  }
  if (name.starts_with("op:")) {
    const auto rest = name.substr(3);
    const auto colons = rest.find("::");
    if (colons == 0 || colons == std::string_view::npos || colons + 2 == rest.size()) return std::nullopt;
    return FunctionName{FunctionKind::torch_operator, rest.substr(0, colons), rest.substr(colons + 2)};
  }
  if (name.starts_with("tf:")) {
    if (name.size() == 3) return std::nullopt;
    return FunctionName{FunctionKind::internal, {}, name.substr(3)};
  }
  if (name.empty()) return std::nullopt;
  return FunctionName{FunctionKind::served, {}, name};
}

std::string python_function(std::string_view module, std::string_view qualname) {
  std::string name;
  name.reserve(4 + module.size() + qualname.size());
  name.append("py:").append(module).append(":").append(qualname);
  return name;
}

}  // namespace tensorferry
