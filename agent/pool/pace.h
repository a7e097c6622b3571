/// How often the reactor ticks.
#pragma once

#include <cstdint>

namespace tensorferry {

/// What a tick found: how soon the next one is needed.
enum class Pace : std::uint8_t {
  rest,    // nothing is under way
  stroll,  // what is under way needs no tick before 100 ms have passed
  walk,    // only deadlines are to be watched
  run,     // work may need help within a millisecond
};

}  // namespace tensorferry
