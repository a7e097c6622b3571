#include "channels/buffer.h"

#include <gtest/gtest.h>

namespace tensorferry {
namespace {

TEST(Device, HasTheTextThatUsersWrite) {
  EXPECT_EQ(text_of(Device{}), "cpu");
  EXPECT_EQ(text_of(Device{DeviceType::cuda, 3}), "cuda:3");
  EXPECT_EQ(text_of(Device{static_cast<DeviceType>(9), 1}), "device(9):1");
}

}  // namespace
}  // namespace tensorferry
