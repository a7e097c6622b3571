#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "converters/cuda.h"
#include "converters/current_streams.h"
#include "rpc/torch_devices.h"
#include "tensorferry/errors.h"
#include "tensorferry/gpus.h"

namespace tensorferry {
namespace {

class TorchGpus final : public TorchDevices {
 public:
  explicit TorchGpus(std::vector<Device> gpus) : gpus_(std::move(gpus)) {
    converters_.add(DeviceType::cpu, host_converter());
    converters_.add(DeviceType::cuda, converter_);
    converters_.add_registered();
  }

  void add_to(RawAgentOptions& options) const override {
    options.devices.insert(options.devices.end(), gpus_.begin(), gpus_.end());
    options.memory.emplace(DeviceType::cuda, converter_->memory());
  }
  [[nodiscard]] std::shared_ptr<void> use_streams_of(std::span<const Buffer> buffers) const override {
    for (const auto& buffer : buffers) {
      if (buffer.device.type == DeviceType::cuda) return std::make_shared<CurrentStreams>(converters_, buffers);
    }
    return nullptr;
  }
  [[nodiscard]] const Converters& converters() const override { return converters_; }

 private:
  const std::vector<Device> gpus_;
  const std::shared_ptr<Converter> converter_ = make_cuda_converter();
  Converters converters_;
};

}  // namespace

Devices gpus(const std::vector<int>& indices) {
  const auto there = gpu_count();
  std::vector<Device> found;
  for (int i = 0; indices.empty() && i < there; ++i) found.push_back({DeviceType::cuda, static_cast<std::uint8_t>(i)});
  for (const auto index : indices) {
    if (index < 0 || index >= there) {
      throw InvalidArgument("there is no cuda:" + std::to_string(index) + ": this process has " +
                            std::to_string(there) + " GPUs");
    }
    found.push_back({DeviceType::cuda, static_cast<std::uint8_t>(index)});
  }
  return found.empty() ? nullptr : std::make_shared<TorchGpus>(std::move(found));
}

}  // namespace tensorferry

/// The link option of tensorferry::cuda refers to this, so that a program gets the archive (cmake/Install.cmake).
extern "C" const char tensorferry_with_cuda = 1;
