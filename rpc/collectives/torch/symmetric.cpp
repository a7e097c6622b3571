#include "rpc/collectives/torch/symmetric.h"

#include "converters/cuda.h"
#include "rpc/collectives/cuda/symmetric_memory.h"

namespace tensorferry::collectives {

Status mark_symmetric(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.layout() != at::kStrided || !tensor.has_storage()) {
    return {Code::invalid_argument, "symmetric memory is that of a dense tensor on a CUDA device"};
  }
  report_released_memory();
  const auto& storage = tensor.storage();
  cuda::mark_symmetric(tensor.get_device(), static_cast<const std::byte*>(storage.data()), storage.nbytes());
  return {};
}

}  // namespace tensorferry::collectives
