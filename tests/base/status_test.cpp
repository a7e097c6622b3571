#include "base/status.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace tensorferry {
namespace {

TEST(Status, OkIsEmptyAndTrue) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_TRUE(static_cast<bool>(status));
  EXPECT_EQ(status.code(), Code::ok);
  EXPECT_EQ(status.what(), "");
  EXPECT_EQ(status.text(), "Ok");
}

TEST(Status, AnErrorTextHasItsNameAndMessage) {
  const Status status(Code::connection_lost, "trainer3 closed the connection");
  Status copy;
  copy = status;
  EXPECT_FALSE(copy.ok());
  EXPECT_EQ(copy.code(), Code::connection_lost);
  EXPECT_EQ(copy.text(), "ConnectionLost: trainer3 closed the connection");
  EXPECT_EQ(Status(Code::internal, "").text(), "InternalError");
}

TEST(Status, EveryCodeHasAUniqueName) {
  std::set<std::string_view> names;
  for (int code = 0; code < code_count; ++code) {
    EXPECT_TRUE(names.insert(name_of(static_cast<Code>(code))).second) << code;
  }
  EXPECT_FALSE(names.contains("Unknown"));
}

TEST(Status, AnUnknownCodeOfANewerPeerHasText) {
  EXPECT_EQ(Status(static_cast<Code>(200), "what").text(), "Unknown: what");
}

TEST(Result, HoldsAValueOrAnError) {
  Result<std::string> value(std::string("three"));
  EXPECT_TRUE(value.ok());
  EXPECT_EQ(*value, "three");
  EXPECT_EQ(value->size(), 5u);
  EXPECT_TRUE(value.status().ok());
  Result<std::string> error(Status(Code::not_found, "none"));
  EXPECT_FALSE(error.ok());
  EXPECT_EQ(error.status().code(), Code::not_found);
}

}  // namespace
}  // namespace tensorferry
