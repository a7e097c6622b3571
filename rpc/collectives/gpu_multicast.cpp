#include "rpc/collectives/gpu_multicast.h"

#include "base/text.h"
#include "rpc/collectives/gpu_choice.h"

namespace tensorferry::collectives {
namespace {

bool is_bitwise(Reduction reduction) {
  return reduction == Reduction::band || reduction == Reduction::bor || reduction == Reduction::bxor;
}

SwitchReduction only(bool condition, SwitchReduction how) { return condition ? how : SwitchReduction::none; }

}  // namespace

SwitchReduction switch_reduction(DType dtype, Reduction reduction) noexcept {
  const bool sum = reduction == Reduction::sum, average = reduction == Reduction::average;
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
    case DType::complex32:
      return only(sum, SwitchReduction::rounded);
    case DType::float32:
    case DType::float64:
    case DType::complex64:
    case DType::complex128:
      return only(sum || average, SwitchReduction::rounded);
    case DType::int32:
    case DType::uint32:
    case DType::int64:
    case DType::uint64: {
      const bool ordered = reduction == Reduction::min || reduction == Reduction::max;
      return only(sum || average || ordered || is_bitwise(reduction), SwitchReduction::exact);
    }
    case DType::int8:
    case DType::uint8:
    case DType::int16:
    case DType::uint16:
      return only(is_bitwise(reduction), SwitchReduction::exact);
    default:
      return SwitchReduction::none;
  }
}

std::string explain_multicast(const AskedOnGpu& asked, std::string_view why_not, const Prescribed& prescribed,
                              const Crossings& crossings) {
  if (asked.operation != Operation::all_reduce || asked.ranks < 2 || !asked.reachable) return {};
  if (!why_not.empty()) return formatted("; the switch reduces nothing (multicast), because {}", why_not);
  constexpr std::string_view integers =
      "sums, averages, minima and maxima of integers of 32 and 64 bits, and the bitwise reductions of all integers";
  constexpr std::string_view sums =
      "sums of float16, bfloat16, float32, float64 and complex numbers, and averages of those of 32 bits and more";
  constexpr std::string_view rest = "; kernels do other reductions, because the switch has no instruction for them";
  auto rounded = asked;
  rounded.by_switch = SwitchReduction::rounded;
  if (!choose_on_gpu(rounded, prescribed, crossings).by_switch) {
    return formatted(
        "; the switch reduces by multicast: {}; kernels reduce floating-point numbers in one_shot, because "
        "each rank would ask the switch, and might get other bits{}",
        integers, rest);
  }
  return formatted("; the switch reduces by multicast, and the kernels then meet by flags: {}, {}{}", sums, integers,
                   rest);
}

}  // namespace tensorferry::collectives
