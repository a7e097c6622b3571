/// The reduction kernels. Each kernels_*.cpp includes this file and compiles it for another instruction set. So
/// everything has internal linkage, and the file uses no inline function of the standard library.
///
/// A kernel accumulates a block of elements of all ranks in a type of its own before it writes the block. So the output
/// may be one of the inputs, and narrow types are rounded once.
#pragma once

#include "include/tensorferry/dtype.h"
#include "rpc/collectives/combinations.h"
#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives {
namespace {

template <class T, class Combination>
void run(const void* const* inputs, std::size_t ranks, void* out, std::size_t count, double factor) {
  using Wide = typename Accumulation<T>::Wide;
  constexpr std::size_t block = 4096 / sizeof(Wide);
  Wide sums[block];
  for (std::size_t at = 0; at < count; at += block) {
    const std::size_t n = count - at < block ? count - at : block;
    const T* input = static_cast<const T*>(inputs[0]) + at;
    for (std::size_t i = 0; i < n; ++i) sums[i] = Combination::prepare(Accumulation<T>::widen(input[i]), factor);
    for (std::size_t rank = 1; rank < ranks; ++rank) {
      input = static_cast<const T*>(inputs[rank]) + at;
      for (std::size_t i = 0; i < n; ++i) {
        sums[i] = Combination::combine(sums[i], Combination::prepare(Accumulation<T>::widen(input[i]), factor));
      }
    }
    T* const output = static_cast<T*>(out) + at;
    for (std::size_t i = 0; i < n; ++i) Accumulation<T>::narrow(Combination::finish(sums[i], ranks), output[i]);
  }
}

/// The same for the parts of complex elements, if the parts do not mix.
template <class Real, class Combination>
void run_parts(const void* const* inputs, std::size_t ranks, void* out, std::size_t count, double factor) {
  run<Real, Combination>(inputs, ranks, out, 2 * count, factor);
}

/// `Bits` has the sums, products and bits of a signed type without its undefined overflow.
template <class T, class Bits>
ReduceKernel integer(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return &run<Bits, Sum>;
    case Reduction::average:
      return &run<Bits, IntegerAverage<T>>;
    case Reduction::product:
      return &run<Bits, Product>;
    case Reduction::min:
      return &run<T, Min>;
    case Reduction::max:
      return &run<T, Max>;
    case Reduction::band:
      return &run<Bits, And>;
    case Reduction::bor:
      return &run<Bits, Or>;
    case Reduction::bxor:
      return &run<Bits, Xor>;
    default:
      return nullptr;
  }
}

template <class T>
ReduceKernel real(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return &run<T, Sum>;
    case Reduction::average:
      return &run<T, Average>;
    case Reduction::product:
      return &run<T, Product>;
    case Reduction::min:
      return &run<T, Min>;
    case Reduction::max:
      return &run<T, Max>;
    case Reduction::premultiplied_sum:
      return &run<T, PremultipliedSum>;
    default:
      return nullptr;
  }
}

template <class Real>
ReduceKernel complex(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return &run_parts<Real, Sum>;
    case Reduction::average:
      return &run_parts<Real, Average>;
    case Reduction::product:
      return &run<Pair<Real>, Product>;
    case Reduction::premultiplied_sum:
      return &run_parts<Real, PremultipliedSum>;
    default:
      return nullptr;
  }
}

ReduceKernel boolean(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::max:
    case Reduction::bor:
      return &run<Boolean, Or>;
    case Reduction::product:
    case Reduction::min:
    case Reduction::band:
      return &run<Boolean, And>;
    case Reduction::bxor:
      return &run<Boolean, Xor>;
    default:
      return nullptr;
  }
}

ReduceKernel find_kernel(DType dtype, Reduction reduction) {
  switch (dtype) {
    case DType::boolean:
      return boolean(reduction);
    case DType::uint8:
      return integer<std::uint8_t, std::uint8_t>(reduction);
    case DType::int8:
      return integer<std::int8_t, std::uint8_t>(reduction);
    case DType::uint16:
      return integer<std::uint16_t, std::uint16_t>(reduction);
    case DType::int16:
      return integer<std::int16_t, std::uint16_t>(reduction);
    case DType::uint32:
      return integer<std::uint32_t, std::uint32_t>(reduction);
    case DType::int32:
      return integer<std::int32_t, std::uint32_t>(reduction);
    case DType::uint64:
      return integer<std::uint64_t, std::uint64_t>(reduction);
    case DType::int64:
      return integer<std::int64_t, std::uint64_t>(reduction);
    case DType::float16:
      return real<Half>(reduction);
    case DType::bfloat16:
      return real<BrainFloat>(reduction);
    case DType::float32:
      return real<float>(reduction);
    case DType::float64:
      return real<double>(reduction);
    case DType::float8_e5m2:
      return real<Float8E5M2>(reduction);
    case DType::float8_e4m3fn:
      return real<Float8E4M3>(reduction);
    case DType::float8_e5m2fnuz:
      return real<Float8E5M2Fnuz>(reduction);
    case DType::float8_e4m3fnuz:
      return real<Float8E4M3Fnuz>(reduction);
    case DType::complex32:
      return complex<Half>(reduction);
    case DType::complex64:
      return complex<float>(reduction);
    case DType::complex128:
      return complex<double>(reduction);
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace tensorferry::collectives
