/// The ticket of a buffer of 0 bytes, which needs no transfer: the same one in every channel.
#pragma once

#include <cstdint>

namespace tensorferry {

struct EmptyBuffer {
  static constexpr std::uint8_t tag = 0;
};

}  // namespace tensorferry
