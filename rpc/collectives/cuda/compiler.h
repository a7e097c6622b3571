/// Compiles the reduction kernels for a GPU, with NVRTC, CUDA's compiler library. It is loaded at run time, as libcuda
/// is: torch's wheels bring it along.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "include/tensorferry/reduction.h"

namespace tensorferry::collectives::cuda {

/// The C++ types that a kernel is compiled for: the template arguments of reduce() in reduce_kernel.h.
struct KernelTypes {
  std::string_view element;
  std::string_view combination;
  unsigned parts = 1;  // of such elements in one of the dtype: 2 if the parts of a complex number do not mix
};
/// Returns the types for these elements; `element` is empty if the reduction is not defined for the dtype, or is
/// custom.
KernelTypes kernel_types(DType dtype, Reduction reduction) noexcept;

/// The programs, each a header with kernels.
enum class KernelProgram : std::uint8_t {
  reduce,  // reduce_kernel.h: "tensorferry_reduce"
  flags,   // flag_kernels.h: "tensorferry_one_shot", "_two_shot", "_exchange", "_reduce_pieces", for GPUs from 7.0 on
};

/// Returns the major versions of NVRTC to look for, the best first. `runtime` is the major version of the CUDA runtime
/// that this process has loaded, torch's (0: none); its NVRTC is the best. `driver` is the newest one that the driver
/// supports (0: unknown); newer ones are left out, because the driver does not load their images.
std::vector<int> nvrtc_versions(int runtime, int driver);

/// Compiles a program for GPUs of that compute capability (90: 9.0) and that many ranks, and returns the image that
/// the driver loads. `kernel` is the name of the one that is wanted; empty: all of them. One kernel takes about 0.2 s.
/// ChannelUnavailable: there is no NVRTC, or it does not know the GPU; the text says which. Thread-safe.
Result<std::vector<char>> compile_kernels(KernelProgram program, const KernelTypes& types, int capability,
                                          unsigned ranks, std::string_view kernel = {});

}  // namespace tensorferry::collectives::cuda
