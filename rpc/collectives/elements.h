/// Elements of the narrow floating-point dtypes: conversions from and to float32, by plain operations on integers and
/// floats. Each kernels_*.cpp includes this file and compiles it for another instruction set, and NVRTC compiles it for
/// GPUs (combinations.h). So everything has internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorferry::collectives {
namespace {

#ifdef __CUDACC__
inline float float_of(std::uint32_t bits) { return __uint_as_float(bits); }
inline std::uint32_t bits_of(float value) { return __float_as_uint(value); }
#else
inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
#endif

struct Half {
  std::uint16_t bits;
};
struct BrainFloat {
  std::uint16_t bits;
};
/// A float8: `exponent` bits with `bias`, `mantissa` bits. `finite`: the format of the names in "fnuz", whose only NaN
/// is the negative zero. `infinite`: it has infinities.
template <int exponent, int mantissa, int bias, bool finite, bool infinite>
struct Float8 {
  std::uint8_t bits;
};
using Float8E5M2 = Float8<5, 2, 15, false, true>;
using Float8E4M3 = Float8<4, 3, 7, false, false>;
using Float8E5M2Fnuz = Float8<5, 2, 16, true, false>;
using Float8E4M3Fnuz = Float8<4, 3, 8, true, false>;

inline float widen(Half value) {
  const std::uint32_t magnitude = value.bits & 0x7fffU;
  // The product corrects the exponent's bias and normalises subnormals.
  const auto scaled = bits_of(float_of(magnitude << 13U) * 0x1p112F);
  const std::uint32_t special = magnitude >= 0x7c00U ? 0x7f800000U : 0;
  return float_of(scaled | special | (std::uint32_t{value.bits} & 0x8000U) << 16U);
}
inline float widen(BrainFloat value) { return float_of(std::uint32_t{value.bits} << 16U); }

template <int exponent, int mantissa, int bias, bool finite, bool infinite>
inline float widen(Float8<exponent, mantissa, bias, finite, infinite> value) {
  const std::uint32_t magnitude = value.bits & 0x7fU;
  const std::uint32_t sign = std::uint32_t{value.bits & 0x80U} << 24U;
  // 2^(127 - bias) moves the bias; as for Half.
  const float scale = float_of(static_cast<std::uint32_t>(127 + 127 - bias) << 23U);
  auto bits = bits_of(float_of(magnitude << (23U - mantissa)) * scale);
  if constexpr (finite) {
    if (value.bits == 0x80U) return float_of(0x7fc00000U);
  } else if constexpr (infinite) {
    if (magnitude >= (((1U << exponent) - 1) << mantissa)) bits |= 0x7f800000U;
  } else {
    if (magnitude == 0x7fU) bits = 0x7fc00000U;
  }
  return float_of(bits | sign);
}

inline void narrow(float value, Half& out) {
  const auto bits = bits_of(value);
  const auto magnitude = bits & 0x7fffffffU;
  // Normal: round to nearest, ties to even, then move the bias. Subnormal: the addition of 0.5 lets the processor
  // round.
  const auto rounded = (magnitude + 0xfffU + (magnitude >> 13U & 1U)) >> 13U;
  const auto normal = rounded - ((127U - 15U) << 10U);
  const auto subnormal = bits_of(float_of(magnitude) + 0.5F) - bits_of(0.5F);
  auto result = magnitude < 0x38800000U ? subnormal : normal;
  result = magnitude >= 0x477ff000U ? 0x7c00U : result;
  result |= bits >> 16U & 0x8000U;
  out.bits = static_cast<std::uint16_t>(magnitude > 0x7f800000U ? 0x7e00U : result);
}
inline void narrow(float value, BrainFloat& out) {
  const auto bits = bits_of(value);
  const auto rounded = (bits + 0x7fffU + (bits >> 16U & 1U)) >> 16U;
  out.bits = static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? 0x7fc0U : rounded);
}

template <int exponent, int mantissa, int bias, bool finite, bool infinite>
inline void narrow(float value, Float8<exponent, mantissa, bias, finite, infinite>& out) {
  const auto bits = bits_of(value);
  const auto magnitude = bits & 0x7fffffffU;
  const std::uint32_t sign = bits >> 24U & 0x80U;
  constexpr std::uint32_t largest = finite ? 0x7fU : infinite ? 0x7bU : 0x7eU;
  constexpr std::uint32_t above = finite ? 0x80U : infinite ? 0x7cU : 0x7fU;
  std::uint32_t code = 0;
  const int scale = static_cast<int>(magnitude >> 23U) - 127;
  const int below = scale < 1 - bias ? 1 - bias - scale : 0;
  const int shift = 23 - mantissa + below;
  if (shift < 26 && magnitude >= 0x00800000U) {
    const auto significand = (magnitude & 0x7fffffU) | 0x800000U;
    const auto half = (1U << static_cast<unsigned>(shift)) >> 1U;
    const auto odd = significand >> static_cast<unsigned>(shift) & 1U;
    const auto rounded = (significand + half - 1 + odd) >> static_cast<unsigned>(shift);
    code = below > 0 ? rounded : (static_cast<std::uint32_t>(scale + bias) << mantissa) + rounded - (1U << mantissa);
  }
  if (magnitude > 0x7f800000U) {
    out.bits = static_cast<std::uint8_t>(finite ? 0x80U : sign | 0x7fU);
  } else if (code > largest || scale > 16) {
    out.bits = static_cast<std::uint8_t>(finite ? 0x80U : sign | above);
  } else {
    out.bits = static_cast<std::uint8_t>(finite && code == 0 ? 0 : sign | code);
  }
}

}  // namespace
}  // namespace tensorferry::collectives
