// The GPUs of a group in a build without CUDA.
#include "rpc/collectives/cuda/direct_group.h"
#include "rpc/collectives/cuda/symmetric_memory.h"

namespace tensorferry::collectives::cuda {
namespace {

class Absent final : public DirectGroup {
 public:
  Result<std::string> prepare(int /*device*/, StartOptions /*options*/) override {
    return std::string("this build of TensorFerry has no CUDA parts");
  }
  std::shared_ptr<DeviceRun> run_on(int /*device*/, Stream /*stream*/) override { return nullptr; }
  [[nodiscard]] std::string why_not_captured(int /*device*/) const override {
    return "this build of TensorFerry has no CUDA parts";
  }
  void drain(const std::function<bool()>&) override {}
};

}  // namespace

std::shared_ptr<DirectGroup> DirectGroup::of(std::shared_ptr<RawGroup> /*group*/, Threads /*threads*/) {
  return std::make_shared<Absent>();
}

void mark_symmetric(int /*device*/, const std::byte* /*data*/, std::size_t /*bytes*/) {}

}  // namespace tensorferry::collectives::cuda
