/// Finds this process's mappings of TensorFerry's shared memory, from /proc/self/maps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

namespace tensorferry {

/// Calls `each(begin, end)` for every such mapping, with its addresses.
template <class Each>
void for_shared_mappings(Each each) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:tensorferry") == std::string::npos) continue;
    char* dash = nullptr;
    const auto begin = std::strtoull(line.c_str(), &dash, 16);
    each(begin, std::strtoull(dash + 1, nullptr, 16));
  }
}

inline std::size_t shared_mappings() {
  std::size_t count = 0;
  for_shared_mappings([&](auto, auto) { ++count; });
  return count;
}

inline bool in_shared_mapping(const void* data, std::size_t bytes) {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  bool inside = false;
  for_shared_mappings([&](auto begin, auto end) { inside = inside || (at >= begin && at + bytes <= end); });
  return inside;
}

}  // namespace tensorferry
