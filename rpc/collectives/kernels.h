/// The reduction kernels. Each kernels_*.cpp includes this file and compiles it for another instruction set. So
/// everything has internal linkage, and the file uses no inline function of the standard library.
///
/// A kernel accumulates a block of elements of all ranks in a type of its own before it writes the block. So the output
/// may be one of the inputs, and narrow types are rounded once.
#pragma once

#include "include/tensorferry/dtype.h"
#include "rpc/collectives/elements.h"
#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives {
namespace {

/// How an element of type T accumulates: `Wide` is the type of the accumulator.
template <class T>
struct Accumulation {
  using Wide = T;
  static Wide widen(T value) { return value; }
  static void narrow(Wide value, T& out) { out = value; }
};
template <class T>
struct InFloat {
  using Wide = float;
  static Wide widen(T value) { return collectives::widen(value); }
  static void narrow(Wide value, T& out) { collectives::narrow(value, out); }
};
template <>
struct Accumulation<Half> : InFloat<Half> {};
template <>
struct Accumulation<BrainFloat> : InFloat<BrainFloat> {};
template <int e, int m, int b, bool f, bool i>
struct Accumulation<Float8<e, m, b, f, i>> : InFloat<Float8<e, m, b, f, i>> {};
/// A bool lies in memory as a byte.
struct Boolean {
  std::uint8_t byte;
};
template <>
struct Accumulation<Boolean> {
  using Wide = std::uint8_t;
  static Wide widen(Boolean value) { return value.byte != 0 ? 1 : 0; }
  static void narrow(Wide value, Boolean& out) { out.byte = value; }
};
template <class Real>
struct Pair {
  Real real, imaginary;
};
template <class T>
struct Accumulation<Pair<T>> {
  using Part = Accumulation<T>;
  using Wide = Pair<typename Part::Wide>;
  static Wide widen(Pair<T> value) { return {Part::widen(value.real), Part::widen(value.imaginary)}; }
  static void narrow(Wide value, Pair<T>& out) {
    Part::narrow(value.real, out.real);
    Part::narrow(value.imaginary, out.imaginary);
  }
};

struct Plain {
  template <class W>
  static W prepare(W value, double /*factor*/) {
    return value;
  }
  template <class W>
  static W finish(W value, std::size_t /*ranks*/) {
    return value;
  }
};
struct Sum : Plain {
  template <class W>
  static W combine(W a, W b) {
    return static_cast<W>(a + b);
  }
};
struct Average : Sum {
  template <class W>
  static W finish(W value, std::size_t ranks) {
    return static_cast<W>(value / static_cast<W>(ranks));
  }
};
/// The average of integers of type T, whose sums wrap like unsigned ones.
template <class T>
struct IntegerAverage : Sum {
  template <class W>
  static W finish(W value, std::size_t ranks) {
    if constexpr (static_cast<T>(-1) < T{0}) {
      return static_cast<W>(static_cast<T>(value) / static_cast<std::int64_t>(ranks));
    } else {
      return static_cast<W>(value / ranks);
    }
  }
};
struct PremultipliedSum : Sum {
  template <class W>
  static W prepare(W value, double factor) {
    return static_cast<W>(value * static_cast<W>(factor));
  }
};
struct Product : Plain {
  template <class W>
  static W combine(W a, W b) {
    return static_cast<W>(1U * a * b);  // unsigned: 16 bits would be multiplied as int, which overflows
  }
  template <class R>
  static Pair<R> combine(Pair<R> a, Pair<R> b) {
    auto rr = a.real * b.real, ii = a.imaginary * b.imaginary, ri = a.real * b.imaginary, ir = a.imaginary * b.real;
#if defined(__x86_64__)
    // GCC 12 fuses the products with the sums if it vectorises them for AVX-512, even with -ffp-contract=off.
    asm("" : "+x"(rr), "+x"(ii), "+x"(ri), "+x"(ir));  // NOLINT(hicpp-no-assembler)
#endif
    return {rr - ii, ri + ir};
  }
};
struct Min : Plain {
  template <class W>
  static W combine(W a, W b) {
    return b < a || b != b ? b : a;  // a NaN stays
  }
};
struct Max : Plain {
  template <class W>
  static W combine(W a, W b) {
    return b > a || b != b ? b : a;
  }
};
struct And : Plain {
  template <class W>
  static W combine(W a, W b) {
    return static_cast<W>(a & b);
  }
};
struct Or : Plain {
  template <class W>
  static W combine(W a, W b) {
    return static_cast<W>(a | b);
  }
};
struct Xor : Plain {
  template <class W>
  static W combine(W a, W b) {
    return static_cast<W>(a ^ b);
  }
};

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
