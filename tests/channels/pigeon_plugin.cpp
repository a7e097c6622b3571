// A plugin for plugins_test: a channel that connects no devices, and a reduction.
#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "tensorferry/plugin.h"

namespace {

using namespace tensorferry;

class PluginPigeon final : public Driver {
 public:
  [[nodiscard]] std::string_view name() const override { return "pigeon"; }
  std::variant<Bytes, Refusal> descriptor(Device) override { return Refusal{"no pigeon at hand"}; }
  std::optional<Refusal> reaches(ByteView, ByteView) override { return Refusal{"no pigeon at hand"}; }
  std::unique_ptr<Channel> open(Wire&, DevicePair) override { return nullptr; }
};

const ChannelPlugin pigeon("pigeon", 70, [] { return std::make_unique<PluginPigeon>(); });
const ReductionPlugin last("last", [](void* into, const void* from, std::size_t count, DType) {
  auto* const to = static_cast<int*>(into);
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<const int*>(from)[i];
});

}  // namespace

#ifdef OF_ANOTHER_VERSION
extern "C" __attribute__((visibility("default"))) const tensorferry::detail::PluginLibrary* tensorferry_plugin() {
  static const tensorferry::detail::PluginLibrary library{"0.0", nullptr};
  return &library;
}
#else
TENSORFERRY_PLUGIN
#endif
