#include <ATen/ops/from_blob.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "channels/host_memory.h"
#include "converters/cpu.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "rpc/cpp/reading.h"
#include "rpc/tensor.h"
#include "rpc/torch_devices.h"
#include "tensorferry/errors.h"
#include "tensorferry/plugin.h"
#include "tensorferry/torch.h"

namespace tensorferry {
namespace {

/// Returns the converters of host memory, and those that are registered now. They stay: a message may be read by them.
const Converters& host_converters() {
  static std::mutex mutex;
  static std::map<std::uint64_t, Converters> all;  // by the number of changes of the list
  const auto changes = Plugins::of_process().changes();
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = all.try_emplace(changes);
  if (is_new) {
    at->second.add(DeviceType::cpu, host_converter());
    at->second.add_registered();
  }
  return at->second;
}

/// Returns the converters of the agent whose devices these are. Null: those of host memory.
const Converters& converters_of(const detail::DeviceTensors* devices) {
  const auto* const torch = dynamic_cast<const TorchDevices*>(devices);
  return torch == nullptr ? host_converters() : torch->converters();
}

}  // namespace

const std::shared_ptr<Converter>& host_converter() {
  static const std::shared_ptr<Converter> one = std::make_shared<CpuConverter>(std::make_shared<HostMemory>());
  return one;
}

Tensor from_torch(const at::Tensor& tensor) {
  if (!tensor.defined()) throw InvalidArgument("an undefined at::Tensor cannot be sent");
  if (tensor.layout() != at::kStrided || !tensor.device().is_cpu()) {
    throw InvalidArgument(
        "a Tensor is strided and in host memory: convert tensor.cpu(), or send the at::Tensor itself");
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

void Value<at::Tensor>::write(ValueWriter& out, const at::Tensor& value) {
  detail::check(TensorWriter(converters_of(out.devices()), out.encoder()).write(value, false));
}

at::Tensor Value<at::Tensor>::read(ValueReader& in) {
  auto& reading = in.reading();
  const auto tag = reading.peek();
  if (tag != Tag::tensor && tag != Tag::sparse) return to_torch(in.tensor());  // a numpy array, or a mismatch
  auto& reader = reading.foreign_tensors();
  if (!reader) {
    const auto* const core = reading.core();
    const auto& converters = converters_of(core == nullptr ? nullptr : core->devices.devices.get());
    reader = std::make_shared<TensorReader>(converters, reading.message().buffers);
  }
  auto tensor = static_cast<TensorReader*>(reader.get())->read(reading.take(), tag);
  if (tag == Tag::sparse) reading.read_whole();
  return detail::value_or_throw(std::move(tensor));
}

}  // namespace tensorferry
