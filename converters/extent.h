/// Which part of its storage a strided view covers.
#pragma once

#include <cstdint>
#include <span>

namespace tensorferry {

/// In elements, from the view's first one.
struct Extent {
  std::int64_t span = 0;  // from the first element to the last, both included; 0 where the view has none
  bool gapless = false;   // the view covers each of them
};

/// Of a view with `sizes` and `strides` (none negative), as many of the one as of the other. Elements may overlap, as
/// those of expand() and unfold() do. A view is called gapless where its dimensions, in the order of their strides,
/// each begin where the one before has not yet ended; contrived overlapping views without a gap may be missed.
Extent extent_of(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides);

}  // namespace tensorferry
