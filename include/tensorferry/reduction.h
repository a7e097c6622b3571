/// Reductions of tensors over the ranks of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tensorferry/dtype.h"

namespace tensorferry {

/// How the elements of all ranks become one.
enum class Reduction : std::uint8_t {
  sum = 0,      // of bools: or
  average = 1,  // the sum divided by the number of ranks; of integers: rounded towards zero
  product = 2,  // of bools: and
  min = 3,
  max = 4,
  band = 5,               // bitwise and; integers and bool
  bor = 6,                // bitwise or; integers and bool
  bxor = 7,               // bitwise exclusive or; integers and bool
  premultiplied_sum = 8,  // each rank's element times ReduceOp::factor, then the sum; floating-point and complex
  custom = 9,             // ReduceOp::combine
  last = custom,
};

/// Returns "sum", "premultiplied_sum", ...
std::string_view name_of(Reduction reduction) noexcept;

/// A reduction with its parameters. Every rank gets the same bits, and the same from run to run: the ranks are combined
/// in their order; in a ring, in their order from another rank on for each share. float16, bfloat16 and the float8
/// dtypes are accumulated in float32 and rounded once.
struct ReduceOp {
  Reduction kind = Reduction::sum;
  double factor = 1;  // of premultiplied_sum; the same at every rank
  /// Of custom: combines `count` elements of `other` into `accumulator`, element by element, on any thread. It must be
  /// the same function at every rank. What it throws fails the group.
  std::function<void(void* accumulator, const void* other, std::size_t count, DType dtype)> combine{};
  bool any_order = false;  // of custom: the ranks may be combined in any order and grouping; the same at every rank

  ReduceOp() = default;
  ReduceOp(Reduction reduction) : kind(reduction) {}  // NOLINT(google-explicit-constructor)
};

}  // namespace tensorferry
