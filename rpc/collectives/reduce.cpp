#include "rpc/collectives/reduce.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/text.h"
#include "rpc/collectives/kernel_sets.h"

namespace tensorferry {

std::string_view name_of(Reduction reduction) noexcept {
  switch (reduction) {
    case Reduction::sum:
      return "sum";
    case Reduction::average:
      return "average";
    case Reduction::product:
      return "product";
    case Reduction::min:
      return "min";
    case Reduction::max:
      return "max";
    case Reduction::band:
      return "band";
    case Reduction::bor:
      return "bor";
    case Reduction::bxor:
      return "bxor";
    case Reduction::premultiplied_sum:
      return "premultiplied_sum";
    case Reduction::custom:
      return "custom";
  }
  return "?";
}

}  // namespace tensorferry

namespace tensorferry::collectives {

Instructions best_instructions() noexcept {
#if defined(__x86_64__)
  static const auto best = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      return Instructions::avx512;
    }
    return __builtin_cpu_supports("avx2") ? Instructions::avx2 : Instructions::base;
  }();
  return best;
#else
  return Instructions::base;
#endif
}

ReduceKernel kernel_of(DType dtype, Reduction reduction, Instructions instructions) noexcept {
#if defined(__x86_64__)
  if (instructions == Instructions::avx512) return kernel_avx512(dtype, reduction);
  if (instructions == Instructions::avx2) return kernel_avx2(dtype, reduction);
#endif
  (void)instructions;
  return kernel_base(dtype, reduction);
}

bool reduces_in_turn(const ReduceOp& op, DType dtype) noexcept {
  switch (op.kind) {
    case Reduction::custom:
      return op.any_order;
    case Reduction::average:
    case Reduction::premultiplied_sum:
      return false;
    default:
      break;
  }
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
    case DType::complex32:
    case DType::float8_e5m2:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2fnuz:
    case DType::float8_e4m3fnuz:
      return false;
    default:
      return true;
  }
}

Status check_reduction(const ReduceOp& op, DType dtype) {
  if (op.kind == Reduction::custom) {
    if (op.combine) return {};
    return {Code::invalid_argument, "a custom reduction needs a function"};
  }
  if (kernel_of(dtype, op.kind, Instructions::base) != nullptr) return {};
  return {Code::invalid_argument, formatted("{} is not defined for {} elements", name_of(op.kind), name_of(dtype))};
}

namespace {

void reduce_custom(const ReduceOp& op, DType dtype, std::span<const std::byte* const> inputs, std::byte* out,
                   std::size_t count) {
  const auto size = size_of(dtype);
  const auto block = std::max<std::size_t>(1, 65536 / size);
  std::vector<std::byte> sums(std::min(block, count) * size);
  for (std::size_t at = 0; at < count; at += block) {
    const auto n = std::min(block, count - at);
    std::memcpy(sums.data(), inputs[0] + at * size, n * size);
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      op.combine(sums.data(), inputs[rank] + at * size, n, dtype);
    }
    std::memcpy(out + at * size, sums.data(), n * size);
  }
}

}  // namespace

void reduce(const ReduceOp& op, DType dtype, std::span<const std::byte* const> inputs, std::byte* out,
            std::size_t count) {
  if (count == 0) return;
  if (op.kind == Reduction::custom) return reduce_custom(op, dtype, inputs, out, count);
  std::vector<const void*> pointers(inputs.begin(), inputs.end());
  kernel_of(dtype, op.kind)(pointers.data(), pointers.size(), out, count, op.factor);
}

}  // namespace tensorferry::collectives
