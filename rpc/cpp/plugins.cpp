#include "rpc/cpp/failures.h"
#include "tensorferry/plugin.h"

namespace tensorferry {

ReduceOp registered_reduction(std::string_view name) {
  return detail::value_or_throw(Plugins::of_process().reduction(name));
}

std::vector<std::string> load_plugin(const std::string& path) {
  return detail::value_or_throw(Plugins::of_process().load(path));
}

}  // namespace tensorferry
