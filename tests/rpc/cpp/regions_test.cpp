#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/rpc/cpp/typed_agents.h"

namespace {

using namespace tensorferry;
using namespace tensorferry::testing;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A float32 tensor of that shape: 0, 1, 2, ...
Tensor counted(Tensor tensor) {
  const auto all = tensor.elements<float>();
  std::iota(all.begin(), all.end(), 0.0F);
  return tensor;
}

std::vector<float> values_of(const Tensor& tensor) {
  const auto all = tensor.elements<float>();
  return {all.begin(), all.end()};
}

/// "sim" owns regions in memory of the given kind, and "trainer" uses them.
class TypedRegions : public TypedAgents, public ::testing::WithParamInterface<const char*> {
 protected:
  [[nodiscard]] static Tensor make(Tensor::Shape shape) {
    const bool mapped = std::string(GetParam()) == "mapped";
    return counted(mapped ? mappable_tensor(std::move(shape), DType::float32)
                          : Tensor::empty(std::move(shape), DType::float32));
  }
};
INSTANTIATE_TEST_SUITE_P(, TypedRegions, ::testing::Values("mapped", "other"),
                         [](const auto& each) { return std::string(each.param); });

TEST_P(TypedRegions, AreFoundByNameAndReadByRowsAndBlocks) {
  const auto table = sim->region(make({4, 3}), {.name = "table"});
  const auto found = trainer->find_region("sim", "table");
  EXPECT_EQ(found.dtype(), DType::float32);
  EXPECT_THAT(found.shape(), ElementsAre(4, 3));
  EXPECT_THAT(found.carried(), GetParam() == std::string("mapped") ? ::testing::Matcher<std::string>("mapped")
                                                                   : AnyOf("in place", "served"));
  EXPECT_EQ(values_of(found.read()), values_of(table.tensor()));
  EXPECT_THAT(values_of(found.rows(1, 2).read()), ElementsAre(3, 4, 5, 6, 7, 8));
  EXPECT_THAT(values_of(found.rows(1, 3).rows(2, 1).read()), ElementsAre(9, 10, 11));
  const std::array<std::int64_t, 3> indices{3, 0, 3};
  EXPECT_THAT(values_of(found.read_blocks(indices)), ElementsAre(9, 10, 11, 0, 1, 2, 9, 10, 11));
  EXPECT_THAT(values_of(found.rows(2, 2).read_blocks(std::array<std::int64_t, 1>{1})), ElementsAre(9, 10, 11));
  EXPECT_EQ(found.rows(4, 0).read().size(), 0U);
}

TEST_P(TypedRegions, AreWrittenBeforeTheNotificationComes) {
  const auto cells = sim->region(make({4, 2}), {.name = "cells", .write = true});
  const auto found = trainer->find_region("sim", "cells");
  found.rows(1, 1).write(Tensor::from_vector(std::vector<float>{-1, -2}, {1, 2}));
  found.write_blocks(std::array<std::int64_t, 2>{3, 0}, Tensor::from_vector(std::vector<float>{6, 7, 8, 9}, {2, 2}),
                     {.notify = 5});
  const auto told = cells.await_notification(5, patience);
  EXPECT_EQ(told.peer, "trainer");
  EXPECT_EQ(told.number, 5U);
  EXPECT_THAT(values_of(cells.tensor()), ElementsAre(8, 9, -1, -2, 4, 5, 6, 7));
}

TEST_P(TypedRegions, AreOpenedByAHandleThatTravels) {
  OwnRegion kept;
  sim->serve("make", [&] {
    kept = sim->region(make({6}));
    return kept.handle();
  });
  const auto handle = trainer->call<RegionHandle>("sim", "make").get();
  EXPECT_EQ(handle.owner, "sim");
  EXPECT_THAT(values_of(trainer->open_region(handle).read()), ElementsAre(0, 1, 2, 3, 4, 5));
  auto earlier = handle;
  ++earlier.incarnation;
  EXPECT_THAT(thrown_by<NotFound>([&] { (void)trainer->open_region(earlier); }), HasSubstr("earlier process"));
}

TEST_P(TypedRegions, EndWhenTheyAreDropped) {
  auto first = sim->region(make({2}), {.name = "short"});
  const auto found = trainer->find_region("sim", "short");
  EXPECT_THAT(values_of(found.read()), ElementsAre(0, 1));
  first.drop();
  first.drop();
  EXPECT_THAT(thrown_by<NotFound>([&] { (void)found.read(); }), HasSubstr("dropped or replaced"));
  EXPECT_THAT(thrown_by<NotFound>([&] { (void)trainer->find_region("sim", "short"); }), HasSubstr("no region"));
  EXPECT_THAT(thrown_by<NotFound>([&] { (void)first.await_notification({}, patience); }), HasSubstr("region"));

  auto second = std::make_unique<OwnRegion>(sim->region(make({3}), {.name = "short"}));
  const auto again = trainer->find_region("sim", "short");
  EXPECT_EQ(again.read().size(), 3U);
  second.reset();  // the last one drops it
  thrown_by<NotFound>([&] { (void)again.read(); });
}

TEST_P(TypedRegions, KeepTheirMemoryUntilTheyEnd) {
  auto tensor = make({1000});
  const std::weak_ptr<void> memory = tensor.owner();
  auto region = std::make_unique<OwnRegion>(sim->region(tensor, {.name = "kept"}));
  tensor = {};
  EXPECT_EQ(values_of(trainer->find_region("sim", "kept").rows(999, 1).read()), std::vector<float>{999});
  EXPECT_FALSE(memory.expired());
  region.reset();
  const auto until = std::chrono::steady_clock::now() + patience;
  while (!memory.expired() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(memory.expired());
}

using RegionRefusals = TypedAgents;

TEST_F(RegionRefusals, NameWhatIsNotAllowed) {
  const auto table = sim->region(Tensor::empty({4}, DType::float32), {.name = "table"});
  const auto found = trainer->find_region("sim", "table");
  EXPECT_THAT(thrown_by<PermissionDenied>([&] { found.write(Tensor::empty({4}, DType::float32)); }),
              HasSubstr("does not let this agent write"));
  const auto secret = sim->region(Tensor::empty({4}, DType::float32), {.name = "secret", .peers = {"other"}});
  EXPECT_THAT(thrown_by<PermissionDenied>([&] { (void)trainer->find_region("sim", "secret").read(); }),
              HasSubstr("peers"));
}

TEST_F(RegionRefusals, NameWhatDoesNotFit) {
  const auto table = sim->region(counted(Tensor::empty({4, 2}, DType::float32)), {.name = "table", .write = true});
  const auto found = trainer->find_region("sim", "table");
  const auto refused = [](auto function) { return thrown_by<InvalidArgument>(function); };
  EXPECT_THAT(refused([&] { found.read_into(Tensor::empty({8}, DType::float32)); }), HasSubstr("float32 4 2"));
  EXPECT_THAT(refused([&] { found.write(Tensor::empty({4, 2}, DType::int32)); }), HasSubstr("not a int32"));
  EXPECT_THAT(refused([&] { (void)found.read_blocks(std::array<std::int64_t, 1>{4}); }), HasSubstr("row 4"));
  EXPECT_THAT(refused([&] { (void)found.read_blocks(std::array<std::int64_t, 1>{-1}); }), HasSubstr("row -1"));
  EXPECT_THAT(refused([&] { (void)found.rows(3, 2); }), HasSubstr("rows"));
  EXPECT_THAT(refused([&] { (void)found.read({.notify = 1}); }), HasSubstr("notification"));
  EXPECT_THAT(refused([&] { (void)trainer->open_region({"sim", 0, 0}); }), HasSubstr("handle"));
  EXPECT_THAT(refused([&] { (void)PeerRegion().read(); }), HasSubstr("empty"));
  EXPECT_THAT(refused([&] { (void)OwnRegion().handle(); }), HasSubstr("empty"));
  const auto gaps = Tensor::from_memory(table.tensor().raw(), {4}, DType::float32, table.tensor().owner(), {2});
  EXPECT_THAT(refused([&] { (void)sim->region(gaps); }), HasSubstr("contiguous"));
  const auto column = trainer->find_region("sim", "table");
  column.write_blocks(
      std::array<std::int64_t, 2>{0, 1},
      Tensor::from_memory(table.tensor().raw(), {2, 2}, DType::float32, table.tensor().owner(), {1, 2}));
  EXPECT_THAT(values_of(table.tensor()), ElementsAre(0, 2, 1, 3, 4, 5, 6, 7)) << "a tensor with gaps is copied first";
}

TEST_F(RegionRefusals, WaitsForNotificationsEndInTime) {
  const auto table = sim->region(Tensor::empty({4}, DType::float32));
  thrown_by<DeadlineExceeded>([&] { (void)table.await_notification({}, 10ms); });
}

using RegionEndings = TypedAgents;

TEST_F(RegionEndings, AnOwnerThatLeavesIsAnErrorAtItsReaders) {
  const auto table = sim->region(counted(mappable_tensor({4}, DType::float32)), {.name = "table"});
  const auto found = trainer->find_region("sim", "table");
  EXPECT_THAT(values_of(found.read()), ElementsAre(0, 1, 2, 3));
  sim->leave();
  const auto until = std::chrono::steady_clock::now() + patience;
  bool failed = false;
  while (!failed && std::chrono::steady_clock::now() < until) {
    try {
      (void)found.read();
    } catch (const ConnectionLost&) {
      failed = true;
    } catch (const NotFound&) {
      failed = true;
    }
  }
  EXPECT_TRUE(failed);
}

TEST_F(RegionEndings, ShutdownDoesNotWaitForHandlesThatPeersHold) {
  const auto table = sim->region(counted(Tensor::empty({4}, DType::float32)), {.name = "table"});
  const auto found = trainer->find_region("sim", "table");
  const auto own = trainer->region(Tensor::empty({4}, DType::float32), {.name = "own"});
  const auto back = sim->find_region("trainer", "own");
  sim->shutdown(std::chrono::duration_cast<std::chrono::milliseconds>(patience));
  trainer->shutdown(std::chrono::duration_cast<std::chrono::milliseconds>(patience));
}

/// A process with a region "table" until it is killed.
TEST(RegionOwnerKills, AreErrorsAtReadersWithinTime) {
  std::array<int, 2> ports{}, ready{};
  ASSERT_EQ(::pipe(ports.data()), 0);
  ASSERT_EQ(::pipe(ready.data()), 0);
  const auto child = ::fork();
  if (child == 0) {
    std::uint16_t port = 0;
    if (::read(ports[0], &port, sizeof port) != sizeof port) ::_exit(1);
    const auto owner = join(connect_store("127.0.0.1", port), "owner");
    const auto table = owner->region(counted(mappable_tensor({4}, DType::float32)), {.name = "table"});
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  const StoreServer server;
  const auto port = server.port();
  ASSERT_EQ(::write(ports[1], &port, sizeof port), static_cast<ssize_t>(sizeof port));
  const auto reader = join(connect_store("127.0.0.1", port), "reader");
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const auto found = reader->find_region("owner", "table");
  EXPECT_THAT(values_of(found.read()), ElementsAre(0, 1, 2, 3));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const auto until = std::chrono::steady_clock::now() + patience;
  std::string lost;
  while (lost.empty() && std::chrono::steady_clock::now() < until) {
    try {
      (void)found.read();
    } catch (const ConnectionLost& error) {
      lost = error.what();
    }
  }
  EXPECT_THAT(lost, HasSubstr("owner"));
  thrown_by<Error>([&] { (void)reader->find_region("owner", "table", 1s); });
}

}  // namespace
