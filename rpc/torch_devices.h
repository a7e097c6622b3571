/// The part of a C++ agent's devices that knows torch: the converters of its GPUs.
#pragma once

#include "converters/registry.h"
#include "rpc/cpp/device_tensors.h"

namespace tensorferry {

class TorchDevices : public detail::DeviceTensors {
 public:
  /// Returns the converters, those of host memory included.
  [[nodiscard]] virtual const Converters& converters() const = 0;
};

/// Returns the converter of host memory, which all agents of C++ programs share.
const std::shared_ptr<Converter>& host_converter();

}  // namespace tensorferry
