/// How elements accumulate and combine in a reduction. The kernels of processors (kernels.h) and of GPUs
/// (cuda/reduce_kernel.h) share this file, so that both compute the same bits. NVRTC compiles it too, so it includes no
/// header but the two of elements.h. Everything has internal linkage, as in elements.h.
#pragma once

#include "rpc/collectives/elements.h"

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
#if defined(__x86_64__) && !defined(__CUDACC__)
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

}  // namespace
}  // namespace tensorferry::collectives
