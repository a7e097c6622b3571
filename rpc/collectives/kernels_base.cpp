#include "rpc/collectives/kernel_sets.h"
#include "rpc/collectives/kernels.h"

namespace tensorferry::collectives {

ReduceKernel kernel_base(DType dtype, Reduction reduction) noexcept { return find_kernel(dtype, reduction); }

}  // namespace tensorferry::collectives
