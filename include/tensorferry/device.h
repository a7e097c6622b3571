/// The devices that hold tensors.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace tensorferry {

/// The type of a device. The numbers are those of c10::DeviceType and appear on the wire: never renumber.
enum class DeviceType : std::uint8_t { cpu = 0, cuda = 1 };

/// One device: its type and its index among the devices of that type.
struct Device {
  DeviceType type = DeviceType::cpu;
  std::uint8_t index = 0;  // always 0 for cpu
  auto operator<=>(const Device&) const = default;
};

/// Returns the name of the device: "cpu", "cuda:1".
std::string text_of(Device device);

}  // namespace tensorferry
