/// The table of algorithms on GPUs: which one an operation uses, by how the GPUs are joined and shared, the number of
/// ranks, and its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "rpc/collectives/choose.h"
#include "rpc/collectives/gpu_topology.h"

namespace tensorferry::collectives {

enum class AlgorithmOnGpu : std::uint8_t {
  one_shot = 0,  // each rank reduces all bytes that it takes itself, in one step
  two_shot = 1,  // each rank reduces its share of the bytes, then takes the other shares
  by_one = 2,    // one rank reduces all bytes, and the others take the result
  by_host = 3,   // a thread of each rank's host reduces all bytes, when the streams have copied them there
  copies = 4,    // nothing is reduced: each rank copies the bytes that it takes
  staged = 5,    // the ranks exchange the bytes in host memory, as they do those of tensors of the CPU
  last = staged,
};
std::string_view name_of(AlgorithmOnGpu algorithm) noexcept;

/// An operation that asks for its algorithm. All ranks ask alike, but for the last two members.
struct AskedOnGpu {
  Operation operation = Operation::all_reduce;
  std::size_t bytes = 0;  // of the tensor that is reduced or broadcast; else of all pieces that a rank gives or takes
  std::size_t ranks = 1;
  RankPlacement placement = RankPlacement::gpu_each;
  bool reachable = true;   // each rank has mapped the memory of all others
  bool flags = false;      // each rank's GPU has kernels that meet by flags
  bool captured = false;   // into a CUDA graph
  bool aligned = true;     // this rank's input begins at a multiple of 16 bytes
  bool contiguous = true;  // this rank's input has no gaps
};

/// Where the kernels of a reduction read this rank's own bytes. The other ranks do not depend on it.
enum class OwnInput : std::uint8_t {
  in_place = 0,    // in the tensor
  copied = 1,      // in the rank's buffer, to which they are copied first: kernels read 16 bytes at once
  made_dense = 2,  // in a dense copy of the tensor
};

/// How the ranks of an operation meet on the GPUs.
enum class MeetingOnGpu : std::uint8_t {
  by_words = 0,  // the streams write words and wait for those of the others
  by_flags = 1,  // the kernels do, by flags in the memory of the GPUs
};

enum class WhyOnGpu : std::uint8_t {
  one_rank,
  unreachable,
  only_one,  // the operation has one algorithm
  prescribed,
  small_on_one_gpu,  // ranks share a GPU, and the host is faster than turns of the GPU
  one_gpu,           // ranks share a GPU
  up_to_crossing,
  above_crossing,
};

struct GpuChoice {
  AlgorithmOnGpu algorithm = AlgorithmOnGpu::one_shot;
  WhyOnGpu why = WhyOnGpu::one_rank;
  MeetingOnGpu meeting = MeetingOnGpu::by_words;
  OwnInput own_input = OwnInput::in_place;
  bool through_host = false;  // by_one: the bytes of the others, and their result, cross the host
};

/// Chooses the algorithm. Pure. `algorithm`, `why` and `meeting` do not depend on AskedOnGpu::aligned and contiguous,
/// which may differ between the ranks; so all ranks choose alike. A prescribed algorithm that GPUs do not have is
/// passed over.
GpuChoice choose_on_gpu(const AskedOnGpu& asked, const Prescribed& prescribed, const Crossings& crossings);

/// Returns whether kernels can meet by flags in what was chosen, for any number of bytes: they do also if all ranks
/// reduce in place, in two shots, in memory that the others map.
bool may_meet_by_flags(const GpuChoice& choice, const AskedOnGpu& asked) noexcept;

/// Says for people what choose_on_gpu() has chosen, by which facts, and why not another algorithm. `joined` says how
/// the GPUs are joined.
std::string explain_on_gpu(const AskedOnGpu& asked, const JoinedGpus& joined, const Prescribed& prescribed,
                           const Crossings& crossings);

}  // namespace tensorferry::collectives
