#include "base/function.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

namespace tensorferry {
namespace {

TEST(UniqueFunction, OwnsMoveOnlyTargets) {
  auto owned = std::make_unique<int>(7);
  UniqueFunction<int(int)> add = [owned = std::move(owned)](int more) { return *owned + more; };
  auto moved = std::move(add);
  EXPECT_FALSE(add);  // NOLINT(bugprone-use-after-move): a moved-from function is empty
  EXPECT_EQ(moved(3), 10);
}

TEST(UniqueFunction, IsEmptyByDefault) {
  EXPECT_FALSE(UniqueFunction<void()>());
  EXPECT_FALSE(UniqueFunction<void()>(nullptr));
}

TEST(UniqueFunction, PassesMoveOnlyArgumentsThrough) {
  UniqueFunction<std::string(std::unique_ptr<std::string>)> take = [](std::unique_ptr<std::string> text) {
    return *text;
  };
  EXPECT_EQ(take(std::make_unique<std::string>("text")), "text");
}

TEST(UniqueFunction, DestroysItsTargetWithItself) {
  auto watched = std::make_shared<int>(1);
  {
    UniqueFunction<void()> holds = [watched] {};
    EXPECT_EQ(watched.use_count(), 2);
    holds = nullptr;
    EXPECT_EQ(watched.use_count(), 1);
  }
}

}  // namespace
}  // namespace tensorferry
