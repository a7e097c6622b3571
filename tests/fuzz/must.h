/// The assertion of the fuzzers. It does not depend on NDEBUG.
#pragma once

#include <cstdlib>

namespace tensorferry::fuzzing {

inline void must(bool holds) {
  if (!holds) std::abort();
}

}  // namespace tensorferry::fuzzing
