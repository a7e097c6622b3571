/// Fuzzes the text by which a user chooses channels.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "channels/registry.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  static const auto registry = Registry::built_in();
  static const auto known = registry.names();
  const auto drivers = registry.drivers({reinterpret_cast<const char*>(data), size});
  if (!drivers.ok()) return drivers.status().code() == Code::invalid_argument ? 0 : (std::abort(), 0);
  if ((*drivers).size() > known.size()) std::abort();
  for (const auto& driver : *drivers) {
    if (std::find(known.begin(), known.end(), driver->name()) == known.end()) std::abort();
  }
  return 0;
}
