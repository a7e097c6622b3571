#include "converters/extent.h"

#include <array>
#include <cstddef>

namespace tensorferry {
namespace {

constexpr std::size_t most_dimensions = 64;  // torch's limit

}  // namespace

Extent extent_of(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides) {
  struct Dimension {
    std::int64_t stride;
    std::int64_t steps;  // size - 1
  };
  std::array<Dimension, most_dimensions> sorted;
  std::size_t count = 0;
  std::int64_t span = 1;
  bool row_major = true;  // the common case needs no sorting
  for (std::size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 0) return {0, true};
    const auto steps = sizes[i] - 1;
    if (steps == 0 || strides[i] == 0) continue;
    row_major &= strides[i] <= span;
    span += steps * strides[i];
    if (count == most_dimensions) return {span, row_major};
    // Insertion sort: the dimensions are sorted already unless the view is transposed.
    auto at = count++;
    for (; at > 0 && sorted[at - 1].stride > strides[i]; --at) sorted[at] = sorted[at - 1];
    sorted[at] = {strides[i], steps};
  }
  if (row_major) return {span, true};
  std::int64_t covered = 1;
  for (std::size_t i = 0; i < count; ++i) {
    if (sorted[i].stride > covered) return {span, false};
    covered += sorted[i].steps * sorted[i].stride;
  }
  return {span, true};
}

}  // namespace tensorferry
