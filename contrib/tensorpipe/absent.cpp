#include "contrib/tensorpipe/tensorpipe_channel.h"

namespace tensorferry {
namespace {

class AbsentDriver final : public Driver {
 public:
  [[nodiscard]] std::string_view name() const override { return "tensorpipe"; }
  std::variant<Bytes, Refusal> descriptor(Device) override { return refusal(); }
  std::optional<Refusal> reaches(ByteView, ByteView) override { return refusal(); }
  std::unique_ptr<Channel> open(Wire&, DevicePair) override { return nullptr; }  // no pair has descriptors

 private:
  static Refusal refusal() { return Refusal{"this build has no tensorpipe channel: " TENSORFERRY_NO_TENSORPIPE}; }
};

}  // namespace

std::unique_ptr<Driver> make_tensorpipe_driver(TensorpipeOptions) { return std::make_unique<AbsentDriver>(); }

}  // namespace tensorferry
