/// Computes which part of its storage a strided view covers.
#pragma once

#include <cstdint>
#include <span>

namespace tensorferry {

/// The part of a storage that a view covers, in elements, from the view's first element on.
struct Extent {
  std::int64_t span = 0;  // from the first element to the last, both included; 0 if the view has no elements
  bool gapless = false;   // the view covers each element of the span
};

/// Returns the extent of a view. `sizes` and `strides` have the same length, and no stride is negative. Elements may
/// overlap, as in views of expand() and unfold().
///
/// Sorts the dimensions by stride. A view is gapless if no stride exceeds the elements that the dimensions with smaller
/// strides cover. A few contrived overlapping views without a gap fail this test.
Extent extent_of(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides);

}  // namespace tensorferry
