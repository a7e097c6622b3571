#include "converters/registry.h"
#include "include/tensorferry/plugin.h"

namespace tensorferry {

void Converters::add_registered() {
  for (auto& each : Plugins::of_process().converters()) registered_.emplace_back(each.type, std::move(each.converter));
}

const DeviceConverter* Converters::find_registered(DeviceType type) const {
  for (const auto& [known, converter] : registered_) {
    if (known == type) return converter.get();
  }
  return nullptr;
}

}  // namespace tensorferry
