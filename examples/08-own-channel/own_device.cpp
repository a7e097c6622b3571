// A converter: tensors of a device type that TensorFerry does not know travel through host memory. The device here is a
// toy on torch's PrivateUse1, the type for devices of other projects. Its memory is the host's.
#include <ATen/ATen.h>
#include <tensorferry/agent.h>
#include <tensorferry/converter.h>
#include <tensorferry/torch.h>

#include <cstdio>
#include <utility>

namespace {

at::Tensor to_toy(const at::Tensor& host, at::Device device) {
  auto* const memory = new at::Tensor(host.clone());
  at::DataPtr data(
      memory->data_ptr(), memory, [](void* held) { delete static_cast<at::Tensor*>(held); }, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), memory->nbytes(), std::move(data), nullptr, false);
  auto tensor = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(host.sizes());
  return tensor;
}

at::Tensor to_host(const at::Tensor& tensor) {
  auto* const memory = const_cast<void*>(tensor.unsafeGetTensorImpl()->unsafe_storage().data());
  return at::from_blob(memory, tensor.sizes(), at::TensorOptions().dtype(tensor.dtype())).clone();
}

// Registered before main() begins, and so before any agent is made.
const tensorferry::ConverterPlugin toy(at::kPrivateUse1, {.to_host = to_host, .from_host = to_toy});

}  // namespace

int main() try {
  tensorferry::AgentOptions options{.name = "sender", .store = tensorferry::local_store()};
  const auto sender = tensorferry::Agent::join(options);
  options.name = "receiver";
  options.prepare = [](tensorferry::Agent& agent) {
    agent.serve("where", [](const at::Tensor& tensor) { return tensor.device().str(); });
    agent.serve("same", [](const at::Tensor& tensor) { return tensor; });
  };
  const auto receiver = tensorferry::Agent::join(options);

  const auto tensor = to_toy(at::arange(4, at::kFloat), at::Device(at::kPrivateUse1, 1));
  std::printf("the receiver has the tensor on %s\n",
              sender->call<std::string>("receiver", "where", tensor).get().c_str());
  const auto came = sender->call<at::Tensor>("receiver", "same", tensor).get();
  std::printf("and returns it on %s, with the sum %.0f\n", came.device().str().c_str(),
              to_host(came).sum().item<float>());
  return 0;
} catch (const tensorferry::Error& error) {
  return std::fprintf(stderr, "own_device: %s\n", error.what()), 1;
}
