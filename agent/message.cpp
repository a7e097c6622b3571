#include "agent/message.h"

#include <algorithm>

namespace tensorferry {

std::optional<Device> Placement::find(Device from) const {
  if (all) return all;
  const auto found = std::find_if(map.begin(), map.end(), [from](const auto& entry) { return entry.first == from; });
  return found == map.end() ? std::nullopt : std::optional(found->second);
}

std::size_t Message::bytes() const {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (sharing_of(i) == Sharing::by_value) bytes += buffers[i].bytes;
  }
  return bytes;
}

std::string_view shown_name(std::string_view function) {
  return function.substr(function.rfind(':') + 1);  // npos + 1 is 0
}

}  // namespace tensorferry
