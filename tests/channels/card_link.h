/// What the tests of channels over RDMA cards share: two ends in one process, and the cards that a test may break.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "tests/agent/patience.h"
#include "tests/conformance/device_memory.h"
#include "tests/conformance/outcome.h"
#include "tests/conformance/wire_pair.h"
#include "tests/emulated_verbs/control.h"

namespace tensorferry::conformance {

inline bool eventually(const std::function<bool()>& condition) {
  return tensorferry::testing::eventually(condition, patience);
}

/// A link of two ends. A test of a channel derives from it, and sets `memory` and `pair`.
class CardLink : public ::testing::Test {
 protected:
  WireEnd& a() { return *pair->a; }
  WireEnd& b() { return *pair->b; }
  void wait_until_usable() {
    ASSERT_TRUE(a().wait_ready()->ok()) << a().wait_ready()->text();
    ASSERT_TRUE(b().wait_ready()->ok()) << b().wait_ready()->text();
  }
  /// From now on a buffer that is sent again by the socket never arrives.
  void forbid_bulk() {
    a().bulk().hold_after(0);
    b().bulk().hold_after(0);
  }
  void expect_carries(const Buffer& buffer, std::uint32_t seed) {
    const auto released = a().send(buffer);
    expect_arrives(buffer.bytes, seed);
    EXPECT_EQ(released.wait_name(), "Ok");
  }
  void expect_arrives(std::size_t bytes, std::uint32_t seed) {
    const auto arrivals = b().receive();
    ASSERT_EQ(arrivals.size(), 1U);
    EXPECT_EQ(arrivals.front()->landed.wait_name(), "Ok");
    auto got = arrivals.front()->buffer;
    got.bytes = bytes;
    EXPECT_TRUE(memory->holds(got, seed));
  }

  emulated_verbs::Controls cards = emulated_verbs::controls();
  std::unique_ptr<DeviceMemory> memory;
  std::unique_ptr<WirePair> pair;
};

}  // namespace tensorferry::conformance
