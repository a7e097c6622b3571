/// The reduction kernels of this process's GPUs, by dtype and reduction.
#pragma once

#include <cuda.h>

#include "rpc/collectives/cuda/compiler.h"
#include "rpc/collectives/cuda/flag_arguments.h"
#include "rpc/collectives/cuda/reduce_arguments.h"

namespace tensorferry::collectives::cuda {

/// What a kernel for a dtype and a reduction needs to be launched.
struct KernelLaunch {
  CUfunction function = nullptr;
  unsigned parts = 1;
  std::size_t item = 1;  // bytes of an element
  unsigned ranks = 1;
  unsigned most_blocks = 1;
  double factor = 1;
};

/// A kernel in a GPU's primary context. It stays loaded until the process ends.
class ReductionKernel final {
 public:
  /// Returns the kernel. Its first use compiles it, once for all GPUs of a kind; see compile_kernels().
  /// InvalidArgument: `op` is not defined for the dtype, or is a function of the host. Thread-safe.
  static Result<ReductionKernel> find(int device, DType dtype, const ReduceOp& op, std::size_t ranks);

  /// Enqueues the kernel on `stream`. `arguments` counts elements of the dtype; this sets the factor and the number of
  /// ranks. Call inside DeviceGuard.
  [[nodiscard]] CUresult launch(ReduceArguments arguments, CUstream stream) const;

 private:
  explicit ReductionKernel(KernelLaunch of) : of_(of) {}
  KernelLaunch of_;
};

/// A kernel that meets the other ranks by flags (flag_kernels.h). As ReductionKernel.
class FlagKernel final {
 public:
  enum class Kind : std::uint8_t { one_shot, two_shot, exchange, reduce_pieces };
  /// ChannelUnavailable too if the GPU is older than 7.0.
  static Result<FlagKernel> find(int device, DType dtype, const ReduceOp& op, std::size_t ranks, Kind kind);
  /// Returns the kernel that exchanges elements of this size: 1, 2, 4 or 8 bytes.
  static Result<FlagKernel> find_exchange(int device, std::size_t item, std::size_t ranks);
  /// Returns whether the GPU has such kernels.
  static bool exist_for(int device);

  /// Enqueues the kernel on `stream`. `arguments` counts elements of the dtype; this sets the factor. The number of
  /// blocks follows from `count` alone, so that all ranks launch as many: for pieces too, if all ranks give the same
  /// `count`, which the kernel does not use then. Call inside DeviceGuard.
  [[nodiscard]] CUresult launch(FlagArguments arguments, CUstream stream) const;

 private:
  explicit FlagKernel(KernelLaunch of) : of_(of) {}
  KernelLaunch of_;
};

}  // namespace tensorferry::collectives::cuda
