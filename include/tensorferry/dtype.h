/// The element types of tensors, with their numbers on the wire.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tensorferry {

/// The type of a tensor's elements. The numbers are those of c10::ScalarType and appear on the wire: never renumber.
/// The missing numbers are quantised types, which cannot be sent.
enum class DType : std::uint8_t {
  uint8 = 0,
  int8 = 1,
  int16 = 2,
  int32 = 3,
  int64 = 4,
  float16 = 5,
  float32 = 6,
  float64 = 7,
  complex32 = 8,  // two float16
  complex64 = 9,
  complex128 = 10,
  boolean = 11,
  bfloat16 = 15,
  bits1x8 = 18,
  bits2x4 = 19,
  bits4x2 = 20,
  bits8 = 21,
  bits16 = 22,
  float8_e5m2 = 23,
  float8_e4m3fn = 24,
  float8_e5m2fnuz = 25,
  float8_e4m3fnuz = 26,
  uint16 = 27,
  uint32 = 28,
  uint64 = 29,
  uint1 = 30,  // an integer of less than 8 bits takes a whole byte
  uint2 = 31,
  uint3 = 32,
  uint4 = 33,
  uint5 = 34,
  uint6 = 35,
  uint7 = 36,
  int1 = 37,
  int2 = 38,
  int3 = 39,
  int4 = 40,
  int5 = 41,
  int6 = 42,
  int7 = 43,
  float8_e8m0fnu = 44,
  float4_e2m1fn_x2 = 45,  // two values in one byte
  bcomplex32 = 46,        // two bfloat16; from torch 2.15 on
};

/// Returns the bytes of one element; 0 if the number is no DType.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::uint8:
    case DType::int8:
    case DType::boolean:
    case DType::float8_e5m2:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2fnuz:
    case DType::float8_e4m3fnuz:
    case DType::float8_e8m0fnu:
    case DType::float4_e2m1fn_x2:
    case DType::bits1x8:
    case DType::bits2x4:
    case DType::bits4x2:
    case DType::bits8:
    case DType::uint1:
    case DType::uint2:
    case DType::uint3:
    case DType::uint4:
    case DType::uint5:
    case DType::uint6:
    case DType::uint7:
    case DType::int1:
    case DType::int2:
    case DType::int3:
    case DType::int4:
    case DType::int5:
    case DType::int6:
    case DType::int7:
      return 1;
    case DType::bits16:
    case DType::int16:
    case DType::uint16:
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::int32:
    case DType::uint32:
    case DType::float32:
    case DType::complex32:
    case DType::bcomplex32:
      return 4;
    case DType::int64:
    case DType::uint64:
    case DType::float64:
    case DType::complex64:
      return 8;
    case DType::complex128:
      return 16;
  }
  return 0;
}

/// Returns whether the dtype is complex.
constexpr bool is_complex(DType dtype) {
  return dtype == DType::complex32 || dtype == DType::complex64 || dtype == DType::complex128 ||
         dtype == DType::bcomplex32;
}

/// Returns whether gradients can flow through the dtype: true for the floating-point and complex types.
constexpr bool is_differentiable(DType dtype) {
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
    case DType::float32:
    case DType::float64:
    case DType::float8_e5m2:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2fnuz:
    case DType::float8_e4m3fnuz:
    case DType::float8_e8m0fnu:
    case DType::float4_e2m1fn_x2:
      return true;
    default:
      return is_complex(dtype);
  }
}

/// Returns torch's name of the dtype without the module: "float32", "bool". "?" if the number is no DType.
std::string_view name_of(DType dtype) noexcept;

}  // namespace tensorferry
