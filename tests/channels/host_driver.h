/// The driver of `cuda_basic` for tests without a GPU.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/cuda_basic/cuda_basic_channel.h"

namespace tensorferry::conformance {

/// The driver of `cuda_basic`, except that it also reaches between two CPUs. The real one refuses such a pair, because
/// other channels carry it better.
class HostDriver final : public Driver {
 public:
  [[nodiscard]] std::string_view name() const override { return driver_.name(); }
  std::variant<Bytes, Refusal> descriptor(Device device) override { return driver_.descriptor(device); }
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override {
    const auto refusal = driver_.reaches(mine, theirs);
    return refusal && refusal->reason == "no GPU memory is at either end" ? std::nullopt : refusal;
  }
  [[nodiscard]] bool immediate() const override { return driver_.immediate(); }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override { return driver_.open(wire, pair); }

 private:
  CudaBasicDriver driver_;
};

}  // namespace tensorferry::conformance
