/// The kernels that reduce or exchange and meet in one launch: ranks on GPUs of their own signal and wait by flags in
/// one another's memory. NVRTC compiles this file at run time (compiler.h). The emulated driver of the tests compiles
/// it with the host's compiler, and runs each block on a thread.
///
/// A launch goes like this. Each rank copies its input to its half, and meets the others. In one shot it then reduces
/// the halves of all ranks. In two shots it reduces its share of them, meets the others again, and takes their shares.
/// In an exchange it copies pieces to its half, meets the others, and takes or reduces the pieces that are for it.
/// A block copies exactly what the blocks of its number read at the other ranks, so only these have to meet.
///
/// If a rank lends its input, the others read it there, and the rank need not copy it. After the last read all ranks
/// meet once more, so that the owner may write its input again when its kernel has ended. If all ranks lend inputs that
/// are their outputs too, two shots need no halves, and take any size.
///
/// A rank writes its own memory alone, and flags. So a rank that is late, and comes after the others have given up,
/// harms only itself.
///
/// An epoch is the number of a meeting. A launch uses two, also if it meets once, so launches use the two halves in
/// turn; without halves it uses four.
/// The meeting of the launch in between proves that all ranks have read a half before it is written again. Epochs stay
/// in device memory, so a CUDA graph can replay a launch. Comparisons are cyclic, so a flag that no launch has written
/// for long must not fall half a cycle behind: see keep_up().
///
/// The last block of an operation writes its number to host memory, so that the stream need not. It does so too if it
/// gave up.
#pragma once

#include "rpc/collectives/cuda/flag_arguments.h"
#include "rpc/collectives/cuda/reduce_kernel.h"

#ifndef __CUDACC__
#include "base/futex.h"
#endif

namespace tensorferry::collectives::cuda {
namespace {

// ---- words that other devices and hosts write

#ifdef __CUDACC__
inline void store_release(unsigned* at, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
inline unsigned load_acquire(const unsigned* at) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
/// Writes the word if it still is `seen`.
inline void replace_if(unsigned* at, unsigned seen, unsigned value) {
  unsigned was;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(was)
               : "l"(at), "r"(seen), "r"(value)
               : "memory");
}
/// Adds 1, and returns what the word was. What the blocks that have counted before have written is visible afterwards.
inline unsigned count_one(unsigned* at) {
  unsigned was;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(was) : "l"(at) : "memory");
  return was;
}
inline void rest(const unsigned*, unsigned) {}
constexpr unsigned between_looks = 1U << 6;  // turns of await(); a look at host memory takes about 1 us
constexpr unsigned long_wait = 1U << 14;     // turns
#else
inline std::atomic<std::uint32_t>& atomic_at(unsigned* at) {
  return *reinterpret_cast<std::atomic<std::uint32_t>*>(at);
}
/// Also wakes the threads that rest until the word is written: an emulated GPU has many more threads than there are
/// cores.
inline void store_release(unsigned* at, unsigned value) {
  atomic_at(at).store(value, std::memory_order_release);
  shared_futex_wake(atomic_at(at), INT_MAX);
}
inline unsigned load_acquire(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void replace_if(unsigned* at, unsigned seen, unsigned value) {
  atomic_at(at).compare_exchange_strong(seen, value);
}
inline unsigned count_one(unsigned* at) { return atomic_at(at).fetch_add(1); }
/// Returns when the word is no longer `seen`, and after 20 ms at the latest.
inline void rest(unsigned* at, unsigned seen) {
  shared_futex_wait(atomic_at(at), seen, std::chrono::steady_clock::now() + std::chrono::milliseconds(20));
}
constexpr unsigned between_looks = 1;
constexpr unsigned long_wait = 2;
#endif

/// The flag of `reader` that `from` writes, for their blocks of this number.
inline unsigned* flag_of(const FlagArguments& a, unsigned reader, unsigned from, unsigned block) {
  return a.flags[reader] + (block * most_ranks + from);
}

/// Tells `other` that this rank's block has come to `epoch`.
inline void signal(const FlagArguments& a, unsigned other, unsigned block, unsigned epoch) {
  store_release(flag_of(a, other, a.rank, block), epoch);
}

/// Waits until the block of `other` has come to `epoch`. Returns false if the kernel shall end.
inline bool await(const FlagArguments& a, unsigned other, unsigned block, unsigned epoch) {
  unsigned* const flag = flag_of(a, a.rank, other, block);
  bool told = false;
  for (unsigned turn = 1;; ++turn) {
    const unsigned seen = load_acquire(flag);
    if (static_cast<int>(seen - epoch) >= 0) break;
    if (turn % between_looks == 0 && load_acquire(a.abort) != 0) return false;
    if (turn == long_wait && block == 0) {
      store_release(a.waits + other, 2 * epoch + 1);
      told = true;
    }
    rest(flag, seen);
  }
  if (told) store_release(a.waits + other, 0);
  return true;
}

/// Launches of few blocks leave the flags of the others as they are. This raises the ones of block `i` to `epoch`, the
/// end of a launch, if they are far behind. Does so a few times in each 2^28 epochs. A rank that is ahead may be
/// writing its flag of the next launch, which stays.
inline void keep_up(const FlagArguments& a, unsigned i, unsigned epoch) {
  constexpr unsigned cadence = 1U << 28, widest_launch = 8;  // in epochs
  if (epoch % cadence >= widest_launch) return;
  for (unsigned from = 0; from < a.ranks; ++from) {
    unsigned* const flag = flag_of(a, a.rank, from, i);
    const unsigned seen = load_acquire(flag);
    if (static_cast<int>(epoch - seen) > static_cast<int>(cadence / 2)) replace_if(flag, seen, epoch);
  }
}

/// A block has come to `epoch`, the end of a launch. Each of its threads does this for the numbers of blocks from
/// `first` on, `step` apart. The numbers that no block has are shared out too.
inline void end_launch(const FlagArguments& a, unsigned first, unsigned step, unsigned epoch) {
  for (unsigned i = first; i < most_flag_blocks; i += step) {
    a.epochs[i] = epoch;
    keep_up(a, i, epoch);
  }
}

/// One of `blocks` blocks has no more to do. The last one tells the host.
inline void leave_launch(const FlagArguments& a, unsigned blocks) {
  if (blocks > 1) {
    if (count_one(a.blocks_ended) + 1 != blocks) return;
    *a.blocks_ended = 0;
  }
  store_release(a.ended, a.operation);
}

// ---- a block of threads

#ifdef __CUDACC__
class ThreadBlock {
 public:
  unsigned index() const { return blockIdx.x; }
  unsigned blocks() const { return gridDim.x; }
  /// Calls `work` with the number of each thread of the block, among all threads of the grid.
  template <class Work>
  void each(const Work& work) const {
    work(std::size_t{blockIdx.x} * blockDim.x + threadIdx.x, std::size_t{gridDim.x} * blockDim.x);
  }
  /// Meets the blocks of the same number. What any thread has written before, any thread there reads afterwards.
  bool meet(const FlagArguments& a, unsigned epoch) const {
    __syncthreads();
    int good = 1;
    if (threadIdx.x < a.ranks && threadIdx.x != a.rank) {
      signal(a, threadIdx.x, blockIdx.x, epoch);
      good = await(a, threadIdx.x, blockIdx.x, epoch) ? 1 : 0;
    }
    return __syncthreads_and(good) != 0;
  }
  /// The block has no more to do. All its threads call this.
  void end(const FlagArguments& a, unsigned epoch) const {
    __syncthreads();  // if a launch only takes, its threads have not met, and one may still read the epoch
    end_launch(a, blockIdx.x + threadIdx.x * gridDim.x, blockDim.x * gridDim.x, epoch);
  }
  /// The block leaves the kernel, perhaps because it gave up. All its threads call this.
  void leave(const FlagArguments& a) const {
    if (a.ended == nullptr) return;
    __syncthreads();
    if (threadIdx.x == 0) leave_launch(a, gridDim.x);
  }
};
#else
class ThreadBlock {
 public:
  ThreadBlock(unsigned index, unsigned blocks, unsigned threads) : index_(index), blocks_(blocks), threads_(threads) {}
  [[nodiscard]] unsigned index() const { return index_; }
  [[nodiscard]] unsigned blocks() const { return blocks_; }
  template <class Work>
  void each(const Work& work) const {
    for (unsigned i = 0; i < threads_; ++i) work(std::size_t{index_} * threads_ + i, std::size_t{blocks_} * threads_);
  }
  [[nodiscard]] bool meet(const FlagArguments& a, unsigned epoch) const {
    for (unsigned other = 0; other < a.ranks; ++other) {
      if (other != a.rank) signal(a, other, index_, epoch);
    }
    bool good = true;
    for (unsigned other = 0; other < a.ranks; ++other) {
      if (other != a.rank) good = await(a, other, index_, epoch) && good;
    }
    return good;
  }
  void end(const FlagArguments& a, unsigned epoch) const { end_launch(a, index_, blocks_, epoch); }
  void leave(const FlagArguments& a) const {
    if (a.ended != nullptr) leave_launch(a, blocks_);
  }

 private:
  const unsigned index_, blocks_, threads_;
};
#endif

// ---- the kernels

/// Lets the block leave where the scope ends.
class Leaving {
 public:
  Leaving(const FlagArguments& a, const ThreadBlock& block) : a_(a), block_(block) {}
  ~Leaving() { block_.leave(a_); }
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;

 private:
  const FlagArguments& a_;
  const ThreadBlock& block_;
};

/// Copies `count` elements, those that reduce() gives this thread.
template <class T>
inline void copy_elements(T* to, const T* from, std::size_t count, std::size_t thread, std::size_t threads) {
  constexpr unsigned size = Vector<T>::size;
  const std::size_t vectors = count / size;
  const bool aligned = lies_at_16(to) && lies_at_16(from);
  std::size_t at = thread;
  if (aligned) {
    const auto* const source = reinterpret_cast<const Vector<T>*>(from);
    auto* const target = reinterpret_cast<Vector<T>*>(to);
    for (; at + (vectors_at_once - 1) * threads < vectors; at += vectors_at_once * threads) {
      Vector<T> read[vectors_at_once];  // NOLINT(modernize-avoid-c-arrays)
      for (unsigned i = 0; i < vectors_at_once; ++i) read[i] = source[at + i * threads];
      for (unsigned i = 0; i < vectors_at_once; ++i) target[at + i * threads] = read[i];
    }
    for (; at < vectors; at += threads) target[at] = source[at];
  }
  for (; at < vectors; at += threads) {
    for (unsigned i = 0; i < size; ++i) to[at * size + i] = from[at * size + i];
  }
  for (at = vectors * size + thread; at < count; at += threads) to[at] = from[at];
}

/// The elements that `rank` reduces for all: they begin at multiples of 16 bytes.
struct ElementShare {
  std::size_t begin, end;
};
template <class T>
inline ElementShare element_share(std::size_t count, unsigned rank, unsigned ranks) {
  const std::size_t size = Vector<T>::size, units = (count + size - 1) / size;
  const std::size_t begin = units * rank / ranks * size, end = units * (rank + 1) / ranks * size;
  return {begin < count ? begin : count, end < count ? end : count};
}

/// Reduces elements [at, at + count) of the halves of all ranks into `out`, and into `copy` unless it is null.
template <class T, class Combination, class Halves>
inline void reduce_elements(const FlagArguments& a, unsigned ranks, const Halves& half, std::size_t at,
                            std::size_t count, T* out, T* copy, std::size_t thread, std::size_t threads) {
  ReduceArguments r;
  for (unsigned rank = 0; rank < ranks; ++rank) r.inputs[rank] = half(rank) + at;
  r.out = out;
  r.copy = copy;
  r.count = count;
  r.factor = a.factor;
  r.ranks = a.ranks;
  reduce<T, Combination>(r, ranks, thread, threads);
}

/// Returns whether any rank lends its input.
inline bool lends(const FlagArguments& a, unsigned ranks) {
  for (unsigned rank = 0; rank < ranks; ++rank) {
    if (a.lent[rank] != nullptr) return true;
  }
  return false;
}

/// Two shots without a half: the inputs of all ranks are their outputs too. Each rank reduces its share in its own
/// memory, where the others read it when all have met. Before the owner writes its memory again, all meet once more.
template <class T, class Combination>
inline void reduce_where_all_lie(const FlagArguments& a, unsigned ranks, const ThreadBlock& block, unsigned epoch) {
  const auto source = [&](unsigned rank) { return static_cast<const T*>(a.lent[rank]); };
  T* const output = static_cast<T*>(a.output);
  if (!block.meet(a, epoch + 1)) return;
  block.each([&](std::size_t thread, std::size_t threads) {
    const auto own = element_share<T>(a.count, a.rank, ranks);
    T* const none = nullptr;
    reduce_elements<T, Combination>(a, ranks, source, own.begin, own.end - own.begin, output + own.begin, none, thread,
                                    threads);
  });
  if (!block.meet(a, epoch + 2)) return;
  block.each([&](std::size_t thread, std::size_t threads) {
    for (unsigned i = 1; i < ranks; ++i) {  // each rank begins with another one
      const unsigned other = (a.rank + i) % ranks;
      const auto share = element_share<T>(a.count, other, ranks);
      copy_elements(output + share.begin, source(other) + share.begin, share.end - share.begin, thread, threads);
    }
  });
  if (block.meet(a, epoch + 3)) block.end(a, epoch + 4);
}

/// `ranks` is a.ranks, as a constant if the compiler knows it.
template <class T, class Combination>
inline void reduce_in_one_shot(const FlagArguments& a, unsigned ranks, const ThreadBlock& block) {
  const Leaving leaving(a, block);
  const unsigned epoch = a.epochs[block.index()];
  const std::size_t at = (epoch / 2 % 2) * a.half_bytes;
  const auto half = [&](unsigned rank) { return reinterpret_cast<T*>(static_cast<char*>(a.halves[rank]) + at); };
  const auto source = [&](unsigned rank) {
    return a.lent[rank] != nullptr ? static_cast<const T*>(a.lent[rank]) : static_cast<const T*>(half(rank));
  };
  if (a.lent[a.rank] == nullptr) {
    block.each([&](std::size_t thread, std::size_t threads) {
      copy_elements(half(a.rank), static_cast<const T*>(a.input), a.count, thread, threads);
    });
  }
  if (!block.meet(a, epoch + 1)) return;
  if (a.output != nullptr) {
    block.each([&](std::size_t thread, std::size_t threads) {
      T* const none = nullptr;
      reduce_elements<T, Combination>(a, ranks, source, 0, a.count, static_cast<T*>(a.output), none, thread, threads);
    });
  }
  if (lends(a, ranks) && !block.meet(a, epoch + 2)) return;
  block.end(a, epoch + 2);
}

template <class T, class Combination>
inline void reduce_in_two_shots(const FlagArguments& a, unsigned ranks, const ThreadBlock& block) {
  const Leaving leaving(a, block);
  const unsigned epoch = a.epochs[block.index()];
  if (a.all_in_place) return reduce_where_all_lie<T, Combination>(a, ranks, block, epoch);
  const std::size_t at = (epoch / 2 % 2) * a.half_bytes;
  const auto half = [&](unsigned rank) { return reinterpret_cast<T*>(static_cast<char*>(a.halves[rank]) + at); };
  const auto source = [&](unsigned rank) {
    return a.lent[rank] != nullptr ? static_cast<const T*>(a.lent[rank]) : static_cast<const T*>(half(rank));
  };
  const T* const input = static_cast<const T*>(a.input);
  T* const output = static_cast<T*>(a.output);
  if (a.lent[a.rank] == nullptr) {
    block.each([&](std::size_t thread, std::size_t threads) {
      for (unsigned rank = 0; rank < ranks; ++rank) {
        const auto share = element_share<T>(a.count, rank, ranks);
        copy_elements(half(a.rank) + share.begin, input + share.begin, share.end - share.begin, thread, threads);
      }
    });
  }
  if (!block.meet(a, epoch + 1)) return;
  block.each([&](std::size_t thread, std::size_t threads) {
    const auto own = element_share<T>(a.count, a.rank, ranks);
    T* const copy = output == nullptr ? nullptr : output + own.begin;
    reduce_elements<T, Combination>(a, ranks, source, own.begin, own.end - own.begin, half(a.rank) + own.begin, copy,
                                    thread, threads);
  });
  if (!block.meet(a, epoch + 2)) return;
  if (output != nullptr) {
    block.each([&](std::size_t thread, std::size_t threads) {
      for (unsigned i = 1; i < ranks; ++i) {  // each rank begins with another one
        const unsigned other = (a.rank + i) % ranks;
        const auto share = element_share<T>(a.count, other, ranks);
        copy_elements(output + share.begin, half(other) + share.begin, share.end - share.begin, thread, threads);
      }
    });
  }
  block.end(a, epoch + 2);
}

/// Returns the elements of this launch's half of `rank` that are for rank `taker`.
template <class T>
inline T* slot_for(const FlagArguments& a, unsigned rank, unsigned taker, unsigned epoch) {
  const std::size_t at = (epoch / 2 % 2) * a.half_bytes + taker * a.slot_bytes;
  return reinterpret_cast<T*>(static_cast<char*>(a.halves[rank]) + at);
}

/// Returns the elements of `rank` that are for this rank: in its half, or in its input.
template <class T>
inline const T* piece_of(const FlagArguments& a, unsigned rank, unsigned epoch) {
  if (a.lent[rank] == nullptr) return slot_for<T>(a, rank, a.rank, epoch);
  return reinterpret_cast<const T*>(static_cast<const char*>(a.lent[rank]) + a.rank * a.lent_stride);
}

/// Copies the pieces that this rank gives to its half unless it lends them, and meets the others.
template <class T>
inline bool give_pieces(const FlagArguments& a, unsigned ranks, const ThreadBlock& block, unsigned epoch) {
  block.each([&](std::size_t thread, std::size_t threads) {
    for (unsigned to = 0; to < ranks; ++to) {
      if (a.inputs[to] == nullptr || a.lent[a.rank] != nullptr) continue;
      copy_elements(slot_for<T>(a, a.rank, to, epoch), static_cast<const T*>(a.inputs[to]), a.given[to], thread,
                    threads);
    }
  });
  return block.meet(a, epoch + 1);
}

/// Each rank takes the pieces that are for it.
template <class T>
inline void exchange(const FlagArguments& a, unsigned ranks, const ThreadBlock& block) {
  const Leaving leaving(a, block);
  const unsigned epoch = a.epochs[block.index()];
  if (a.gives && !give_pieces<T>(a, ranks, block, epoch)) return;
  if (!a.takes) return;
  block.each([&](std::size_t thread, std::size_t threads) {
    for (unsigned i = 1; i <= ranks; ++i) {  // each rank begins with another one
      const unsigned from = (a.rank + i) % ranks;
      const T* const piece = piece_of<T>(a, from, epoch);
      if (a.outputs[from] == nullptr || a.outputs[from] == piece) continue;
      copy_elements(static_cast<T*>(a.outputs[from]), piece, a.taken[from], thread, threads);
    }
  });
  if (lends(a, ranks) && !block.meet(a, epoch + 2)) return;
  block.end(a, epoch + 2);
}

/// Each rank reduces the pieces that are for it, of taken[rank] elements each, into outputs[rank].
template <class T, class Combination>
inline void reduce_pieces(const FlagArguments& a, unsigned ranks, const ThreadBlock& block) {
  const Leaving leaving(a, block);
  const unsigned epoch = a.epochs[block.index()];
  if (a.gives && !give_pieces<T>(a, ranks, block, epoch)) return;
  if (!a.takes) return;
  const auto piece = [&](unsigned from) { return piece_of<T>(a, from, epoch); };
  if (a.outputs[a.rank] != nullptr) {
    block.each([&](std::size_t thread, std::size_t threads) {
      T* const none = nullptr;
      reduce_elements<T, Combination>(a, ranks, piece, 0, a.taken[a.rank], static_cast<T*>(a.outputs[a.rank]), none,
                                      thread, threads);
    });
  }
  if (lends(a, ranks) && !block.meet(a, epoch + 2)) return;
  block.end(a, epoch + 2);
}

}  // namespace
}  // namespace tensorferry::collectives::cuda
