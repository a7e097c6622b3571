/// The arguments of the kernels that meet by flags. NVRTC compiles this file too.
#pragma once

#include <cstddef>

#include "rpc/collectives/cuda/reduce_arguments.h"

namespace tensorferry::collectives::cuda {

/// The most blocks of such a kernel. All ranks launch as many, so a block meets those of its number at the other ranks.
inline constexpr unsigned most_flag_blocks = 64;
/// The flags of one rank: a word for each block and each rank that meets it there.
inline constexpr std::size_t flag_words = std::size_t{most_flag_blocks} * most_ranks;

/// What a launch gets. Every rank launches the same kernel with the same count, in the same order; only the addresses
/// and `rank` differ. Nothing here changes from launch to launch by itself, so a captured launch can be replayed: what
/// does change is in the memory at `epochs`.
struct FlagArguments {
  // By rank: its two halves behind one another, and its flags.
  void* halves[most_ranks];     // NOLINT(modernize-avoid-c-arrays): NVRTC has no std::array
  unsigned* flags[most_ranks];  // NOLINT(modernize-avoid-c-arrays)
  // By rank: its input, which all kernels read in place; null: it copies its input to its half. All ranks agree.
  const void* lent[most_ranks];  // NOLINT(modernize-avoid-c-arrays)
  std::size_t half_bytes;        // a multiple of 16
  unsigned* epochs;              // of this rank: a word for each block, equal before and after each launch
  const unsigned* abort;         // in host memory: not 0: the kernel shall end although ranks have not come
  // In host memory, by rank: if the kernel waits for that rank for long, an odd number that names the meeting; else 0.
  unsigned* waits;
  const void* input;  // of this rank, anywhere
  void* output;       // may be `input`; null: this rank takes no result
  std::size_t count;  // of elements: at most a half has, unless all_in_place
  double factor;      // of a premultiplied sum
  // In two shots: every rank lends its input, which is its output too, and the halves are not used.
  bool all_in_place;
  unsigned rank;
  unsigned ranks;
  // By this the host knows that the last launch of an operation has ended: a word in host memory, which then gets the
  // number of the operation. Null in the other launches, and in CUDA graphs.
  unsigned* ended;
  unsigned operation;
  unsigned* blocks_ended;  // of this rank, in device memory: 0 before and after each launch

  // The rest is of exchange() and reduce_pieces(), which use neither `input` nor `count`.
  // A piece that `slot_bytes` places in a half goes to one rank each; 0: one piece goes to every rank that takes it.
  const void* inputs[most_ranks];  // NOLINT(modernize-avoid-c-arrays): by the rank that takes; null: no piece
  void* outputs[most_ranks];       // NOLINT(modernize-avoid-c-arrays): by the rank that gives; null: none is taken
  std::size_t given[most_ranks];   // NOLINT(modernize-avoid-c-arrays): elements of the pieces
  std::size_t taken[most_ranks];   // NOLINT(modernize-avoid-c-arrays)
  std::size_t slot_bytes;          // a multiple of 16
  std::size_t lent_stride;         // from one piece of a lent input to the next, in bytes
  // What the launch does: gives its pieces and meets the others, takes theirs, or both. If an output lies over another
  // input of this rank, all blocks must have read before one writes: then a launch gives, and the next one takes.
  bool gives;
  bool takes;
};

}  // namespace tensorferry::collectives::cuda
