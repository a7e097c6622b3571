#include "channels/rdma/options.h"

#include <charconv>
#include <limits>
#include <optional>

#include "base/environment.h"
#include "base/text.h"

namespace tensorferry::rdma {
namespace {

struct Bounds {
  std::uint64_t least;
  std::uint64_t most;
};

std::optional<std::uint64_t> number_of(std::string_view text, bool size) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  if (unit.empty()) return value;
  if (!size || unit.size() != 1) return std::nullopt;
  const auto power = std::string_view("KMG").find(unit.front());
  if (power == std::string_view::npos) return std::nullopt;
  const auto shift = 10 * (power + 1);
  if (value > std::numeric_limits<std::uint64_t>::max() >> shift) return std::nullopt;
  return value << shift;
}

template <class Number>
Status read_number(const environment::Variable& variable, Bounds range, bool size, Number& option) {
  const auto text = variable.value();
  if (text.empty()) return {};
  const auto value = number_of(text, size);
  if (!value || *value < range.least || *value > range.most) {
    return {Code::invalid_argument, formatted("{}={} is not a {} from {} to {}", variable.name, text,
                                              size ? "size" : "number", range.least, range.most)};
  }
  option = static_cast<Number>(*value);
  return {};
}

}  // namespace

Result<Options> Options::from_environment() {
  constexpr auto largest = std::uint64_t{1} << 62;
  Options options;
  options.devices = environment::rdma_devices.value();
  for (const auto& status : {read_number(environment::rdma_gid_index, {0, 65535}, false, options.gid_index),
                             read_number(environment::rdma_service_level, {0, 15}, false, options.service_level),
                             read_number(environment::rdma_traffic_class, {0, 255}, false, options.traffic_class),
                             read_number(environment::rdma_timeout, {1, 31}, false, options.timeout),
                             read_number(environment::rdma_stripe, {4096, largest}, true, options.stripe_bytes),
                             read_number(environment::rdma_queue_depth, {1, 32768}, false, options.queue_depth),
                             read_number(environment::rdma_pinned, {0, largest}, true, options.pinned_bytes)}) {
    if (!status) return status;
  }
  return options;
}

}  // namespace tensorferry::rdma
