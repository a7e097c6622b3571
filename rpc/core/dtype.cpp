#include "include/tensorferry/dtype.h"

#include <array>
#include <utility>

namespace tensorferry {
namespace {

constexpr auto names = std::to_array<std::pair<DType, std::string_view>>({
    {DType::uint8, "uint8"},
    {DType::int8, "int8"},
    {DType::int16, "int16"},
    {DType::int32, "int32"},
    {DType::int64, "int64"},
    {DType::float16, "float16"},
    {DType::float32, "float32"},
    {DType::float64, "float64"},
    {DType::complex32, "complex32"},
    {DType::complex64, "complex64"},
    {DType::complex128, "complex128"},
    {DType::boolean, "bool"},
    {DType::bfloat16, "bfloat16"},
    {DType::float8_e5m2, "float8_e5m2"},
    {DType::float8_e4m3fn, "float8_e4m3fn"},
    {DType::float8_e5m2fnuz, "float8_e5m2fnuz"},
    {DType::float8_e4m3fnuz, "float8_e4m3fnuz"},
    {DType::uint16, "uint16"},
    {DType::uint32, "uint32"},
    {DType::uint64, "uint64"},
    {DType::float8_e8m0fnu, "float8_e8m0fnu"},
    {DType::float4_e2m1fn_x2, "float4_e2m1fn_x2"},
    {DType::bcomplex32, "bcomplex32"},
    {DType::bits1x8, "bits1x8"},
    {DType::bits2x4, "bits2x4"},
    {DType::bits4x2, "bits4x2"},
    {DType::bits8, "bits8"},
    {DType::bits16, "bits16"},
    {DType::uint1, "uint1"},
    {DType::uint2, "uint2"},
    {DType::uint3, "uint3"},
    {DType::uint4, "uint4"},
    {DType::uint5, "uint5"},
    {DType::uint6, "uint6"},
    {DType::uint7, "uint7"},
    {DType::int1, "int1"},
    {DType::int2, "int2"},
    {DType::int3, "int3"},
    {DType::int4, "int4"},
    {DType::int5, "int5"},
    {DType::int6, "int6"},
    {DType::int7, "int7"},
});

}  // namespace

std::string_view name_of(DType dtype) noexcept {
  for (const auto& [each, name] : names) {
    if (each == dtype) return name;
  }
  return "?";
}

}  // namespace tensorferry
