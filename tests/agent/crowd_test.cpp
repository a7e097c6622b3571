#include "agent/transport/crowd.h"

#include <gtest/gtest.h>

#include <list>

namespace tensorferry {
namespace {

/// A crowd: gather() adds one waiting member more than there are CPUs, and each test adds another one.
class Crowds : public ::testing::Test {
 protected:
  void gather() {
    for (unsigned i = 0; i <= std::thread::hardware_concurrency(); ++i) others_.emplace_back(crowd);
  }
  /// Returns how often a member polls if it finds nothing.
  int looks() {
    int looks = 0;
    Crowd::Member me(crowd);
    EXPECT_FALSE(me.until([&] {
      ++looks;
      return false;
    }));
    return looks;
  }
  Crowd crowd;

 private:
  std::list<Crowd::Member> others_;
};

TEST_F(Crowds, WhoeverWaitsAloneLooksOnce) {
  EXPECT_EQ(looks(), 1);
  EXPECT_TRUE(Crowd::Member(crowd).until([] { return true; }));
}

TEST_F(Crowds, InACrowdOneLooksUntilItIsThere) {
  gather();
  int looks = 0;
  EXPECT_TRUE(Crowd::Member(crowd).until([&] { return ++looks == Crowd::least_looks; }));
}

TEST_F(Crowds, WhatNeverPaysIsTriedOnceIn64Times) {
  gather();
  for (int i = 0; i < 40; ++i) looks();
  int longer = 0;
  for (int i = 0; i < 128; ++i) longer += looks() > 1 ? 1 : 0;
  EXPECT_LE(longer, 60);  // two long polls, and some twenty shorter ones after each
  int finds = 0;
  for (int i = 0; i < 128; ++i) {
    Crowd::Member me(crowd);
    int seen = 0;
    finds += me.until([&] { return ++seen == 2; }) ? 1 : 0;
  }
  EXPECT_GE(finds, 64) << "it pays again";
}

}  // namespace
}  // namespace tensorferry
