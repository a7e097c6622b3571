/// The kernels whose reduction the switch does (multicast, NVLink SHARP): a load from a multicast address gives the
/// reduction of what all GPUs have there, and a store there writes the memory of all. NVRTC compiles this file at run
/// time for GPUs from 9.0 on (compiler.h). The emulated driver of the tests compiles it with the host's compiler.
///
/// A launch goes like this. Each rank copies its input to its half, and meets the others. In one shot it then loads all
/// vectors from the multicast address. In two shots it loads those of its share, and stores the results at the same
/// place of all ranks; it meets the others again, and copies the results from its half. So one rank alone asks the
/// switch for a vector, and all ranks get the same bits, also if the switch adds in an order of its own.
///
/// All work is done in vectors of 16 bytes, which begin at multiples of 16 in the halves. The last one may be partly
/// beyond `count`: what the switch makes of the rest is not used. A thread copies the vectors that the threads of its
/// number load at the other ranks, so only blocks of the same number have to meet. Epochs and halves are used as in
/// flag_kernels.h, with which launches may alternate.
#pragma once

#include "rpc/collectives/cuda/flag_kernels.h"
#include "rpc/collectives/cuda/multicast_arguments.h"

#ifndef __CUDACC__
/// Defined by the emulated driver: writes the addresses at which this process has the memory of each GPU behind a
/// multicast address, and returns how many there are.
extern "C" unsigned tensorferry_emulated_replicas(const void* multicast, void** replicas);
#endif

namespace tensorferry::collectives::cuda {
namespace {

// ---- what the switch reduces: the same as switch_reduction() says of dtypes (gpu_multicast.h)

/// The reduction that the switch does for a combination; the kernel finishes it.
template <class Combination>
struct AtSwitch {
  using Type = Combination;
};
template <>
struct AtSwitch<Average> {
  using Type = Sum;
};
template <class T>
struct AtSwitch<IntegerAverage<T>> {
  using Type = Sum;
};

template <class T, class U>
inline constexpr bool same = false;
template <class T>
inline constexpr bool same<T, T> = true;

/// Whether the switch reduces elements T. An average of narrow floats would be rounded twice; minima and maxima of
/// floats would lose NaNs.
template <class T, class Combination>
constexpr bool switch_reduces() {
  using Operation = typename AtSwitch<Combination>::Type;
  constexpr bool narrow = same<T, Half> || same<T, BrainFloat>, wide = same<T, float> || same<T, double>;
  constexpr bool natural = same<T, std::uint32_t> || same<T, std::uint64_t>;
  constexpr bool integer = natural || same<T, std::int32_t> || same<T, std::int64_t>;
  if (same<Operation, Sum>) return wide || natural || (narrow && same<Combination, Sum>);
  if (same<Operation, Min> || same<Operation, Max>) return integer;
  if (same<Operation, And> || same<Operation, Or> || same<Operation, Xor>) {
    return natural || same<T, std::uint8_t> || same<T, std::uint16_t>;
  }
  return false;
}

// ---- loads and stores at multicast addresses

#ifdef __CUDACC__
/// 16 bytes, in registers of 32 or 64 bits.
template <class T>
union Registers {
  Vector<T> vector;
  unsigned words[4];
  unsigned long long longs[2];
  Registers() {}
};

// An instruction for the whole vector, for each 32 bits of it, or for each 64 bits.
#define TENSORFERRY_LOAD_VECTOR(instruction)                                                   \
  asm volatile("multimem.ld_reduce.relaxed.sys.global." instruction " {%0, %1, %2, %3}, [%4];" \
               : "=r"(r.words[0]), "=r"(r.words[1]), "=r"(r.words[2]), "=r"(r.words[3])        \
               : "l"(at)                                                                       \
               : "memory")
#define TENSORFERRY_LOAD_WORDS(instruction)                                      \
  for (unsigned i = 0; i < 4; ++i)                                               \
  asm volatile("multimem.ld_reduce.relaxed.sys.global." instruction " %0, [%1];" \
               : "=r"(r.words[i])                                                \
               : "l"(at + 4 * i)                                                 \
               : "memory")
#define TENSORFERRY_LOAD_LONGS(instruction)                                      \
  for (unsigned i = 0; i < 2; ++i)                                               \
  asm volatile("multimem.ld_reduce.relaxed.sys.global." instruction " %0, [%1];" \
               : "=l"(r.longs[i])                                                \
               : "l"(at + 8 * i)                                                 \
               : "memory")

/// Memory at a multicast address.
class SwitchMemory {
 public:
  explicit SwitchMemory(void* at) : at_(static_cast<char*>(at)) {}
  /// Returns the reduction of what all GPUs have at this offset.
  template <class T, class Combination>
  Vector<T> load(std::size_t offset) const {
    using Operation = typename AtSwitch<Combination>::Type;
    const char* const at = at_ + offset;
    Registers<T> r;
    if constexpr (same<Operation, Sum>) {
      if constexpr (same<T, float>) {
        TENSORFERRY_LOAD_VECTOR("add.v4.f32");
      } else if constexpr (same<T, Half>) {
        TENSORFERRY_LOAD_VECTOR("add.acc::f32.v4.f16x2");
      } else if constexpr (same<T, BrainFloat>) {
        TENSORFERRY_LOAD_VECTOR("add.acc::f32.v4.bf16x2");
      } else if constexpr (same<T, double>) {
        TENSORFERRY_LOAD_LONGS("add.f64");
      } else if constexpr (same<T, std::uint32_t>) {
        TENSORFERRY_LOAD_WORDS("add.u32");
      } else {
        TENSORFERRY_LOAD_LONGS("add.u64");
      }
    } else if constexpr (same<Operation, Min>) {
      if constexpr (same<T, std::int32_t>) {
        TENSORFERRY_LOAD_WORDS("min.s32");
      } else if constexpr (same<T, std::uint32_t>) {
        TENSORFERRY_LOAD_WORDS("min.u32");
      } else if constexpr (same<T, std::int64_t>) {
        TENSORFERRY_LOAD_LONGS("min.s64");
      } else {
        TENSORFERRY_LOAD_LONGS("min.u64");
      }
    } else if constexpr (same<Operation, Max>) {
      if constexpr (same<T, std::int32_t>) {
        TENSORFERRY_LOAD_WORDS("max.s32");
      } else if constexpr (same<T, std::uint32_t>) {
        TENSORFERRY_LOAD_WORDS("max.u32");
      } else if constexpr (same<T, std::int64_t>) {
        TENSORFERRY_LOAD_LONGS("max.s64");
      } else {
        TENSORFERRY_LOAD_LONGS("max.u64");
      }
    } else if constexpr (same<Operation, And>) {
      TENSORFERRY_LOAD_LONGS("and.b64");
    } else if constexpr (same<Operation, Or>) {
      TENSORFERRY_LOAD_LONGS("or.b64");
    } else {
      TENSORFERRY_LOAD_LONGS("xor.b64");
    }
    return r.vector;
  }
  /// Writes the vector at this offset of all GPUs. It stores the bits of every type as they are.
  template <class T>
  void store(std::size_t offset, const Vector<T>& value) const {
    Registers<T> r;
    r.vector = value;
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at_ + offset), "r"(r.words[0]),
                 "r"(r.words[1]), "r"(r.words[2]), "r"(r.words[3])
                 : "memory");
  }

 private:
  char* const at_;
};
#undef TENSORFERRY_LOAD_VECTOR
#undef TENSORFERRY_LOAD_WORDS
#undef TENSORFERRY_LOAD_LONGS

/// Orders what this thread has done at ordinary addresses before what it does at multicast addresses of the same
/// memory, and the other way round.
inline void order_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }
#else
class SwitchMemory {
 public:
  explicit SwitchMemory(const void* at) : count_(tensorferry_emulated_replicas(at, replicas_)) {}
  /// Combines the GPUs from the last to the first: a real switch does not promise their order either.
  template <class T, class Combination>
  [[nodiscard]] Vector<T> load(std::size_t offset) const {
    Vector<T> out{};
    for (unsigned i = 0; count_ != 0 && i < Vector<T>::size; ++i) {
      auto sum = Accumulation<T>::widen(at<T>(count_ - 1, offset).of[i]);
      for (unsigned gpu = count_ - 1; gpu-- > 0;) {
        sum = Combination::combine(sum, Accumulation<T>::widen(at<T>(gpu, offset).of[i]));
      }
      Accumulation<T>::narrow(sum, out.of[i]);
    }
    return out;
  }
  template <class T>
  void store(std::size_t offset, const Vector<T>& value) const {
    for (unsigned gpu = 0; gpu < count_; ++gpu) at<T>(gpu, offset) = value;
  }

 private:
  template <class T>
  [[nodiscard]] Vector<T>& at(unsigned gpu, std::size_t offset) const {
    return *reinterpret_cast<Vector<T>*>(static_cast<char*>(replicas_[gpu]) + offset);
  }
  void* replicas_[most_ranks] = {};  // NOLINT(modernize-avoid-c-arrays)
  const unsigned count_;
};

inline void order_aliases() {}
#endif

// ---- vectors

/// Copies elements [at, at + Vector<T>::size) that are below `count`.
template <class T>
inline void copy_vector(T* to, const T* from, std::size_t at, std::size_t count) {
  constexpr unsigned size = Vector<T>::size;
  if (at + size <= count && lies_at_16(to) && lies_at_16(from)) {
    *reinterpret_cast<Vector<T>*>(to + at) = *reinterpret_cast<const Vector<T>*>(from + at);
    return;
  }
  for (unsigned i = 0; i < size && at + i < count; ++i) to[at + i] = from[at + i];
}

/// Writes the elements of `from` to [at, at + Vector<T>::size) that are below `count`.
template <class T>
inline void write_vector(T* to, const Vector<T>& from, std::size_t at, std::size_t count) {
  constexpr unsigned size = Vector<T>::size;
  if (at + size <= count && lies_at_16(to)) {
    *reinterpret_cast<Vector<T>*>(to + at) = from;
    return;
  }
  for (unsigned i = 0; i < size && at + i < count; ++i) to[at + i] = from.of[i];
}

/// Returns the reduction of all ranks' elements at `offset` bytes.
template <class T, class Combination>
inline Vector<T> load_reduced(const SwitchMemory& all, std::size_t offset, unsigned ranks) {
  using Accumulator = Accumulation<T>;
  auto out = all.load<T, Combination>(offset);
  if constexpr (!same<typename AtSwitch<Combination>::Type, Combination>) {
    for (unsigned i = 0; i < Vector<T>::size; ++i) {
      Accumulator::narrow(Combination::finish(Accumulator::widen(out.of[i]), ranks), out.of[i]);
    }
  }
  return out;
}

// ---- the kernels

template <class T, class Combination>
inline void reduce_by_switch_in_one_shot(const MulticastArguments& m, const ThreadBlock& block) {
  static_assert(switch_reduces<T, Combination>());
  constexpr unsigned size = Vector<T>::size;
  const FlagArguments& a = m.flags;
  const unsigned epoch = a.epochs[block.index()];
  const std::size_t half = (epoch / 2 % 2) * m.half_bytes;
  T* const own = reinterpret_cast<T*>(static_cast<char*>(m.own) + half);
  const SwitchMemory all(static_cast<char*>(m.all) + half);
  const std::size_t vectors = (a.count + size - 1) / size;
  block.each([&](std::size_t thread, std::size_t threads) {
    for (std::size_t at = thread; at < vectors; at += threads) {
      copy_vector(own, static_cast<const T*>(a.input), at * size, a.count);
    }
  });
  order_aliases();
  if (!block.meet(a, epoch + 1)) return;
  order_aliases();
  if (a.output != nullptr) {
    block.each([&](std::size_t thread, std::size_t threads) {
      for (std::size_t at = thread; at < vectors; at += threads) {
        const auto sums = load_reduced<T, Combination>(all, at * sizeof(Vector<T>), a.ranks);
        write_vector(static_cast<T*>(a.output), sums, at * size, a.count);
      }
    });
  }
  block.end(a, epoch + 2);
}

template <class T, class Combination>
inline void reduce_by_switch_in_two_shots(const MulticastArguments& m, const ThreadBlock& block) {
  static_assert(switch_reduces<T, Combination>());
  constexpr unsigned size = Vector<T>::size;
  const FlagArguments& a = m.flags;
  const unsigned epoch = a.epochs[block.index()];
  const std::size_t half = (epoch / 2 % 2) * m.half_bytes;
  T* const own = reinterpret_cast<T*>(static_cast<char*>(m.own) + half);
  const SwitchMemory all(static_cast<char*>(m.all) + half);
  // Calls `work` with the index of the first element of each vector in the share of `rank` that is this thread's.
  const auto each_of_share = [&](unsigned rank, std::size_t thread, std::size_t threads, const auto& work) {
    const auto share = element_share<T>(a.count, rank, a.ranks);
    for (std::size_t at = share.begin + thread * size; at < share.end; at += threads * size) work(at);
  };
  block.each([&](std::size_t thread, std::size_t threads) {
    for (unsigned rank = 0; rank < a.ranks; ++rank) {
      each_of_share(rank, thread, threads,
                    [&](std::size_t at) { copy_vector(own, static_cast<const T*>(a.input), at, a.count); });
    }
  });
  order_aliases();
  if (!block.meet(a, epoch + 1)) return;
  order_aliases();
  block.each([&](std::size_t thread, std::size_t threads) {
    each_of_share(a.rank, thread, threads, [&](std::size_t at) {
      const auto offset = at / size * sizeof(Vector<T>);
      all.store(offset, load_reduced<T, Combination>(all, offset, a.ranks));
    });
  });
  order_aliases();
  if (!block.meet(a, epoch + 2)) return;
  order_aliases();
  if (a.output != nullptr) {
    block.each([&](std::size_t thread, std::size_t threads) {
      for (unsigned rank = 0; rank < a.ranks; ++rank) {
        each_of_share(rank, thread, threads, [&](std::size_t at) {
          copy_vector(static_cast<T*>(a.output), static_cast<const T*>(own), at, a.count);
        });
      }
    });
  }
  block.end(a, epoch + 2);
}

}  // namespace
}  // namespace tensorferry::collectives::cuda
