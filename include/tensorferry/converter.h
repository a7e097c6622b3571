/// Converters: tensors of a device type that TensorFerry does not know travel through host memory.
///
///     const tensorferry::ConverterPlugin npu(at::DeviceType::PrivateUse1, {
///         .to_host = [](const at::Tensor& tensor) { return tensor.cpu(); },
///         .from_host = [](const at::Tensor& host, at::Device device) { return host.to(device); },
///     });
///
/// Link tensorferry::torch. tensorferry/plugin.h says how registrations work.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <utility>

#include "tensorferry/plugin.h"

namespace tensorferry {

/// Copies strided tensors of one device type to host memory and back.
///
/// The functions run without gradients, on any thread, and at once for several messages. They finish their copies
/// before they return. What they throw fails the call with InvalidArgument, which has the text of the exception.
///
/// Two tensors in one storage arrive in memory of their own each. A receiver without a converter for the type gets the
/// tensor in host memory. The agents of torch.distributed.rpc use no converters: their device maps know GPUs alone.
struct DeviceConverter {
  /// Runs at the sender. Returns a strided tensor in host memory with the sizes and dtype of `tensor`.
  std::function<at::Tensor(const at::Tensor& tensor)> to_host;
  /// Runs at the receiver. `device` has the type and the index of the sender's device; the converter may return a
  /// tensor on another index. The sizes and dtype are those of `host`, which may be written and kept.
  std::function<at::Tensor(const at::Tensor& host, at::Device device)> from_host;
};

/// Registers the converter of a device type other than CPU and CUDA while it lives.
class ConverterPlugin final : detail::PluginEntry {
 public:
  ConverterPlugin(at::DeviceType type, DeviceConverter converter)
      : PluginEntry(Plugins::Converter{at::DeviceTypeName(type, /*lower_case=*/true), static_cast<DeviceType>(type),
                                       std::make_shared<const DeviceConverter>(std::move(converter))}) {}
};

}  // namespace tensorferry
