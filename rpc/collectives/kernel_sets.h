/// The kernels as they were compiled for each instruction set (kernels_*.cpp). Builds for processors other than x86-64
/// have the first set alone.
#pragma once

#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives {

ReduceKernel kernel_base(DType dtype, Reduction reduction) noexcept;
ReduceKernel kernel_avx2(DType dtype, Reduction reduction) noexcept;
ReduceKernel kernel_avx512(DType dtype, Reduction reduction) noexcept;

}  // namespace tensorferry::collectives
