/// Which RDMA cards the two ends of a test have.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/environment.h"

namespace tensorferry::rdma {

/// Returns the value of TENSORFERRY_RDMA_DEVICES for end 0 or end 1. TENSORFERRY_TEST_RDMA=rxe0,rxe1 gives each end a
/// card of its own, so that a cable joins them as it joins two hosts. Otherwise both ends have all cards: "".
inline std::string card_of_end(std::size_t end) {
  auto cards = environment::value_of("TENSORFERRY_TEST_RDMA");
  const auto comma = cards.find(',');
  if (comma == std::string_view::npos) return {};
  return std::string(end == 0 ? cards.substr(0, comma) : cards.substr(comma + 1));
}

}  // namespace tensorferry::rdma
