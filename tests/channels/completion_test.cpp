#include "channels/completion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace tensorferry {
namespace {

TEST(Complete, RunsNowAndPassesTheStatus) {
  Code seen = Code::ok;
  complete([&](Status status) { seen = status.code(); }, Status(Code::cancelled, ""));
  EXPECT_EQ(seen, Code::cancelled);
}

TEST(Complete, IgnoresAnEmptyCompletion) { complete({}, {}); }

struct Chain {
  int left;
  int nesting = 0;
  int deepest = 0;

  void next() {
    if (left-- == 0) return;
    complete(
        [this](Status) {
          deepest = std::max(deepest, ++nesting);
          next();
          --nesting;
        },
        {});
  }
};

TEST(Complete, AChainOfAMillionUsesABoundedStack) {
  Chain chain{.left = 1'000'000};
  chain.next();
  EXPECT_EQ(chain.left, -1);  // all operations of the chain ran before the first call returned
  EXPECT_LE(chain.deepest, max_nesting);
}

TEST(Complete, PostponedCompletionsRunInOrder) {
  std::vector<int> order;
  UniqueFunction<void(int)> nest = [&](int depth) {
    if (depth < max_nesting) return complete([&, depth](Status) { nest(depth + 1); }, {});
    for (int i = 0; i < 5; ++i) complete([&order, i](Status) { order.push_back(i); }, {});
    EXPECT_TRUE(order.empty());
  };
  nest(0);
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
}

}  // namespace
}  // namespace tensorferry
