/// Reduces elements of host memory: the registry of kernels by dtype and reduction, for the best instructions that the
/// processor has.
#pragma once

#include <cstddef>
#include <span>

#include "base/status.h"
#include "include/tensorferry/reduction.h"

namespace tensorferry::collectives {

/// Reduces `ranks` inputs of `count` elements into `out`, which may be one of the inputs and must not overlap another.
using ReduceKernel = void (*)(const void* const* inputs, std::size_t ranks, void* out, std::size_t count,
                              double factor);

/// The instruction sets that the kernels are compiled for.
enum class Instructions : std::uint8_t { base, avx2, avx512, last = avx512 };
/// Returns the best that this processor has and this build knows.
Instructions best_instructions() noexcept;

/// Returns the kernel for these elements, or null if the reduction is not defined for the dtype, or is custom.
ReduceKernel kernel_of(DType dtype, Reduction reduction, Instructions instructions = best_instructions()) noexcept;

/// Returns Ok, or InvalidArgument that says why `op` cannot reduce elements of `dtype`.
Status check_reduction(const ReduceOp& op, DType dtype);

/// Returns whether a result may be reduced with one rank after the other. Not so if it would be rounded in between
/// (float16, bfloat16, float8), or depends on the number of ranks (average) or on their order (most custom ones).
bool reduces_in_turn(const ReduceOp& op, DType dtype) noexcept;

/// Reduces one input of each rank, in the order of the ranks, into `out`. `out` may be one of the inputs.
/// `inputs` is not empty, and check_reduction() has returned Ok.
void reduce(const ReduceOp& op, DType dtype, std::span<const std::byte* const> inputs, std::byte* out,
            std::size_t count);

}  // namespace tensorferry::collectives
