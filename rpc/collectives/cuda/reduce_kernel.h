/// The reduction kernel of GPUs. NVRTC compiles this file at run time, with the headers that it includes (compiler.h).
/// The emulated driver of the tests compiles it with the host's compiler, as if a grid had one thread.
#pragma once

#include "rpc/collectives/combinations.h"
#include "rpc/collectives/cuda/reduce_arguments.h"

namespace tensorferry::collectives::cuda {
namespace {

inline bool lies_at_16(const void* address) { return (reinterpret_cast<std::size_t>(address) & 15U) == 0; }

/// 16 bytes of elements, which a thread reads and writes at once.
template <class T>
struct alignas(16) Vector {
  static constexpr unsigned size = 16 / sizeof(T);
  T of[size];  // NOLINT(modernize-avoid-c-arrays)
};

/// One element, where 16 bytes cannot be read at once.
template <class T>
struct Single {
  static constexpr unsigned size = 1;
  T of[1];  // NOLINT(modernize-avoid-c-arrays)
};

/// How many vectors a thread reads before it writes the first: so many reads of other GPUs' memory are under way at
/// once.
inline constexpr unsigned vectors_at_once = 4;

/// Reduces `many` pieces of all ranks, each of up to 16 bytes, and calls `store` with the number of each and with its
/// result. `load` reads piece `i` of an input.
template <class T, class Combination, unsigned many, class Piece, class Load, class Store>
inline void reduce_several(const ReduceArguments& a, unsigned ranks, const Load& load, const Store& store) {
  using Accumulator = Accumulation<T>;
  Piece pieces[many];
  typename Accumulator::Wide sums[many][Piece::size];
  for (unsigned i = 0; i < many; ++i) pieces[i] = load(a.inputs[0], i);
  for (unsigned i = 0; i < many; ++i) {
    for (unsigned at = 0; at < Piece::size; ++at) {
      sums[i][at] = Combination::prepare(Accumulator::widen(pieces[i].of[at]), a.factor);
    }
  }
  for (unsigned rank = 1; rank < ranks; ++rank) {
    for (unsigned i = 0; i < many; ++i) pieces[i] = load(a.inputs[rank], i);
    for (unsigned i = 0; i < many; ++i) {
      for (unsigned at = 0; at < Piece::size; ++at) {
        const auto next = Combination::prepare(Accumulator::widen(pieces[i].of[at]), a.factor);
        sums[i][at] = Combination::combine(sums[i][at], next);
      }
    }
  }
  for (unsigned i = 0; i < many; ++i) {
    // Not the constant: NVRTC 13 loses the sign of every fourth int8 if it divides a vector of them by a power of two.
    for (unsigned at = 0; at < Piece::size; ++at) {
      Accumulator::narrow(Combination::finish(sums[i][at], a.ranks), pieces[i].of[at]);
    }
    store(i, pieces[i]);
  }
}

/// The work of thread `thread` among `threads`. `ranks` is a.ranks, as a constant if the compiler knows it.
template <class T, class Combination>
inline void reduce(const ReduceArguments& a, unsigned ranks, std::size_t thread, std::size_t threads) {
  constexpr unsigned size = Vector<T>::size;
  bool aligned = true;
  for (unsigned rank = 0; rank < ranks; ++rank) aligned = aligned && lies_at_16(a.inputs[rank]);
  const bool out_aligned = lies_at_16(a.out) && lies_at_16(a.copy);
  const std::size_t vectors = aligned ? a.count / size : 0;
  T* const out = static_cast<T*>(a.out);
  T* const copy = static_cast<T*>(a.copy);
  std::size_t at = thread;
  const auto load = [&at, threads](const void* input, unsigned i) {
    return static_cast<const Vector<T>*>(input)[at + i * threads];
  };
  const auto store = [&](unsigned i, const Vector<T>& result) {
    const std::size_t to = at + i * threads;
    if (out_aligned) {
      static_cast<Vector<T>*>(a.out)[to] = result;
      if (copy != nullptr) static_cast<Vector<T>*>(a.copy)[to] = result;
    } else {
      for (unsigned k = 0; k < size; ++k) out[to * size + k] = result.of[k];
      if (copy == nullptr) return;
      for (unsigned k = 0; k < size; ++k) copy[to * size + k] = result.of[k];
    }
  };
  for (; at + (vectors_at_once - 1) * threads < vectors; at += vectors_at_once * threads) {
    reduce_several<T, Combination, vectors_at_once, Vector<T>>(a, ranks, load, store);
  }
  for (; at < vectors; at += threads) reduce_several<T, Combination, 1, Vector<T>>(a, ranks, load, store);
  for (at = vectors * size + thread; at < a.count; at += threads) {
    const auto load_one = [at](const void* input, unsigned) { return static_cast<const Single<T>*>(input)[at]; };
    reduce_several<T, Combination, 1, Single<T>>(a, ranks, load_one, [&](unsigned, const Single<T>& result) {
      out[at] = result.of[0];
      if (copy != nullptr) copy[at] = result.of[0];
    });
  }
}

}  // namespace
}  // namespace tensorferry::collectives::cuda
