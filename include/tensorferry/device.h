/// Devices that tensors live on.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace tensorferry {

/// Numbers are c10::DeviceType's, and travel.
enum class DeviceType : std::uint8_t { cpu = 0, cuda = 1 };

struct Device {
  DeviceType type = DeviceType::cpu;
  std::uint8_t index = 0;  // always 0 for cpu
  auto operator<=>(const Device&) const = default;
};

/// "cpu", "cuda:1".
std::string text_of(Device device);

}  // namespace tensorferry
