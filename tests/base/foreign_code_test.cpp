#include "base/foreign_code.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace tensorferry {
namespace {

TEST(ForeignCode, LogsTheFirstLineOfWhatItThrows) {
  testing::internal::CaptureStderr();
  run_foreign("a callback", [] { throw std::runtime_error("no such reference\nframe #0"); });
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "tensorferry warning: a callback threw: no such reference\n");
}

TEST(ForeignCode, LogsExceptionsOfEveryType) {
  testing::internal::CaptureStderr();
  run_foreign("a callback", [] { throw 7; });
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "tensorferry warning: a callback threw: an exception that is not a std::exception\n");
}

TEST(ForeignCode, RunsOnIfNothingIsThrown) {
  bool ran = false;
  run_foreign("a callback", [&] { ran = true; });
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace tensorferry
