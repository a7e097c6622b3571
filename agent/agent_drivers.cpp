#include "agent/agent_drivers.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace tensorferry {

/// Returns whether the choice of channels (Registry::drivers) lists the channel `name`.
static bool allows(std::string_view choice, std::string_view name) {
  while (!choice.empty()) {
    const auto comma = std::min(choice.find(','), choice.size());
    auto word = choice.substr(0, comma);
    choice.remove_prefix(std::min(comma + 1, choice.size()));
    word.remove_prefix(std::min(word.find_first_not_of(' '), word.size()));
    if (word.substr(0, word.find(' ')) == name) return true;
  }
  return false;
}

Status AgentDrivers::open(const RawAgentOptions& options) {
  auto drivers = options.registry.drivers(options.channels);
  if (!drivers) return drivers.status();
  if (drivers->size() > most) return {Code::invalid_argument, "the list of channels is longer than an agent can use"};
  drivers_ = std::move(*drivers);
  for (const auto& driver : drivers_) {
    wire::Hello::Driver said{std::string(driver->name()), {}};
    const bool forbidden =
        driver->shares_memory() && !options.shared_memory && !allows(options.channels, driver->name());
    for (const auto device : forbidden ? std::vector<Device>() : options.devices) {
      auto descriptor = driver->descriptor(device);
      if (auto* bytes = std::get_if<Bytes>(&descriptor)) said.endpoints.push_back({device, std::move(*bytes)});
    }
    announced_.push_back(std::move(said));
  }
  return {};
}

}  // namespace tensorferry
