#include "channels/allocations.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "channels/host_memory.h"
#include "channels/region.h"

namespace tensorferry {
namespace {

constexpr Device cpu{};
constexpr std::size_t megabyte = 1 << 20;

Allocations& all() { return Allocations::of_this_process(); }

/// Keeps the generations of which it was told.
class Listener final : public AllocationUser {
 public:
  void gone(std::uint64_t generation) noexcept override { ended.push_back(generation); }
  std::vector<std::uint64_t> ended;
};

TEST(Allocations, ABlockOfAReceivePoolIsKnownAsAWholeWhileItExists) {
  auto listener = std::make_shared<Listener>();
  all().tell(listener);
  std::optional<Allocations::Allocation> found;
  {
    HostMemory memory(HostMemory::Limits{.idle_bytes = 0});
    const auto buffer = memory.allocate(megabyte - 5, cpu);
    found = all().find(buffer.data + 100, 1000);
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->base, buffer.data);
    EXPECT_EQ(found->bytes, megabyte);
    EXPECT_EQ(found->kind, Allocations::Kind::receives);
    EXPECT_FALSE(all().find(buffer.data + 100, megabyte).has_value()) << "it reaches beyond the block";
    EXPECT_TRUE(listener->ended.empty());
  }
  EXPECT_EQ(listener->ended, std::vector<std::uint64_t>{found->generation});
  EXPECT_FALSE(all().find(found->base, 1).has_value());
}

TEST(Allocations, ABlockThatReturnsToItsPoolStaysTheSameAllocation) {
  HostMemory memory;
  std::uint64_t first = 0;
  for (int i = 0; i < 3; ++i) {
    const auto buffer = memory.allocate(megabyte, cpu);
    const auto found = all().find(buffer.data, megabyte);
    ASSERT_TRUE(found.has_value());
    if (i == 0) first = found->generation;
    EXPECT_EQ(found->generation, first);
  }
}

TEST(Allocations, MemoryAtAUsedAddressHasAnotherGeneration) {
  std::vector<std::uint64_t> generations;
  for (int i = 0; i < 3; ++i) {
    HostMemory memory(HostMemory::Limits{.idle_bytes = 0});
    const auto buffer = memory.allocate(megabyte, cpu);  // the system gives the same address again
    generations.push_back(all().find(buffer.data, 1).value().generation);
  }
  std::sort(generations.begin(), generations.end());
  EXPECT_EQ(std::unique(generations.begin(), generations.end()), generations.end());
}

TEST(Allocations, ARegionIsOfferedUntilItsLastOwnerDropsIt) {
  auto listener = std::make_shared<Listener>();
  all().tell(listener);
  auto region = Regions::of_this_process().make(10'000);
  ASSERT_TRUE(region.ok());
  const auto found = all().find(region->data, 10'000);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->kind, Allocations::Kind::offers);
  *region = Buffer{};
  EXPECT_EQ(listener->ended, std::vector<std::uint64_t>{found->generation});
}

TEST(Allocations, MemoryOfOtherAllocatorsIsUnknownUnlessItIsHeld) {
  auto owner = std::make_shared<std::vector<std::byte>>(megabyte);
  auto* const data = owner->data();
  const std::weak_ptr<void> owned = owner;
  EXPECT_FALSE(all().find(data, megabyte).has_value());
  auto listener = std::make_shared<Listener>();
  all().tell(listener);

  auto hold = all().hold(data, megabyte, std::move(owner));
  const auto found = all().find(data + 10, 10);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->kind, Allocations::Kind::offers);
  EXPECT_FALSE(owned.expired());
  hold.reset();
  EXPECT_EQ(listener->ended, std::vector<std::uint64_t>{found->generation});
  EXPECT_FALSE(all().find(data, 1).has_value());
  EXPECT_TRUE(owned.expired());
}

TEST(Allocations, HeldMemoryGoesBeforeTheBlockThatItLiesIn) {
  HostMemory memory;
  const auto buffer = memory.allocate(megabyte, cpu);
  const auto hold = all().hold(buffer.data + 4096, 4096, buffer.owner);
  EXPECT_EQ(all().find(buffer.data + 4096, 100).value().kind, Allocations::Kind::offers);
  EXPECT_EQ(all().find(buffer.data, 8192).value().kind, Allocations::Kind::receives);
}

TEST(Allocations, AForkedChildBeginsWithNone) {
  HostMemory memory;
  const auto buffer = memory.allocate(megabyte, cpu);
  const auto child = ::fork();
  if (child == 0) ::_exit(all().find(buffer.data, 1).has_value() ? 1 : 0);
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(all().find(buffer.data, 1).has_value());
}

}  // namespace
}  // namespace tensorferry
