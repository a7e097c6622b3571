#include <ATen/ops/from_blob.h>

#include <memory>

#include "rpc/tensor.h"
#include "tensorferry/errors.h"
#include "tensorferry/torch.h"

namespace tensorferry {

Tensor from_torch(const at::Tensor& tensor) {
  if (!tensor.defined()) throw InvalidArgument("an undefined at::Tensor cannot be sent");
  if (tensor.layout() != at::kStrided || !tensor.device().is_cpu()) {
    throw InvalidArgument("C++ sends only at::Tensors that are strided and in host memory: send tensor.cpu()");
  }
  const auto dtype = dtype_of(tensor.scalar_type());
  if (!dtype) throw InvalidArgument("an at::Tensor of that dtype cannot be sent");
  const auto plain = std::make_shared<at::Tensor>(tensor.detach().resolve_conj().resolve_neg());
  return Tensor::from_memory(plain->data_ptr(), plain->sizes().vec(), *dtype, plain, plain->strides().vec());
}

at::Tensor to_torch(const Tensor& tensor) {
  const auto type = scalar_type_of(tensor.dtype());
  if (!type) throw InvalidArgument("this version of torch has no " + std::string(name_of(tensor.dtype())));
  if (tensor.device().type != DeviceType::cpu) throw InvalidArgument("a " + tensor.text() + " is not in host memory");
  return at::from_blob(
      tensor.raw(), tensor.shape(), tensor.strides(), [owner = tensor.owner()](void* /*data*/) {},
      at::TensorOptions().dtype(*type));
}

}  // namespace tensorferry
