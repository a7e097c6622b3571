#include "channels/buffer.h"

namespace tensorferry {

std::string text_of(Device device) {
  switch (device.type) {
    case DeviceType::cpu:
      return "cpu";
    case DeviceType::cuda:
      return "cuda:" + std::to_string(device.index);
  }
  return "device(" + std::to_string(static_cast<int>(device.type)) + "):" + std::to_string(device.index);
}

}  // namespace tensorferry
