/// What the switches between GPUs reduce by multicast: an NVSwitch reads the same place of all GPUs, and answers with
/// the reduction (multimem.ld_reduce of GPUs from 9.0 on). This file knows no library of CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "include/tensorferry/reduction.h"
#include "rpc/collectives/choose.h"

namespace tensorferry::collectives {

struct AskedOnGpu;

/// How a switch does a reduction.
enum class SwitchReduction : std::uint8_t {
  none = 0,     // it has no instruction for it, or one with another meaning
  rounded = 1,  // floating-point: it adds in an order and with a precision of its own, so bits may differ by the reader
  exact = 2,    // integers: any order gives the same bits
};

/// Returns how a switch reduces elements of `dtype`. `none` too for what it does with another meaning: minima and
/// maxima of float16 and bfloat16 lose NaNs there, an average of them would be rounded twice, and bools are compared as
/// bytes.
SwitchReduction switch_reduction(DType dtype, Reduction reduction) noexcept;

/// Says for people, as a part of a sentence that begins with "; ", what the switch reduces of an operation. `why_not`:
/// why the group has no multicast; empty: it has. Returns "" for operations, and groups, in which no switch could.
std::string explain_multicast(const AskedOnGpu& asked, std::string_view why_not, const Prescribed& prescribed,
                              const Crossings& crossings);

}  // namespace tensorferry::collectives
