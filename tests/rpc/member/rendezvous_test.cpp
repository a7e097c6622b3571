// How a program, or its environment, names the store.
#include "rpc/member/rendezvous.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace tensorferry {
namespace {

TEST(Rendezvous, MethodsNameTheStore) {
  const auto tcp = find_rendezvous("tcp://trainer:29500", 3, 4);
  ASSERT_TRUE(tcp.ok());
  EXPECT_EQ(tcp->kind, Rendezvous::Kind::torch);
  EXPECT_EQ(tcp->host, "trainer");
  EXPECT_EQ(tcp->port, 29500);
  EXPECT_EQ(tcp->rank, 3);
  EXPECT_EQ(tcp->world_size, 4);
  EXPECT_EQ(find_rendezvous("store://[::1]:7/", -1, 0)->host, "::1");
  EXPECT_EQ(find_rendezvous("store://h:7", -1, 0)->kind, Rendezvous::Kind::own);
  EXPECT_EQ(find_rendezvous("file:///tmp/store", -1, 0)->path, "/tmp/store");
}

TEST(Rendezvous, RefusesTextsThatNameNoStore) {
  for (const auto* method : {"gopher://here", "tcp://host", "tcp://:1", "tcp://host:x", "tcp://host:65536",
                             "tcp://host:-1", "file://", "trainer:29500"}) {
    EXPECT_EQ(find_rendezvous(method, -1, 0).status().code(), Code::invalid_argument) << method;
  }
  EXPECT_EQ(find_rendezvous("tcp://host:1", -1, 2).status().code(), Code::invalid_argument);
  EXPECT_EQ(find_rendezvous("tcp://host:1", 0, -2).status().code(), Code::invalid_argument);
}

TEST(Rendezvous, TheEnvironmentFillsInTheRank) {
  ::setenv("MASTER_ADDR", "leader", 1);
  ::setenv("MASTER_PORT", "1234", 1);
  ::setenv("RANK", "5", 1);
  ::setenv("WORLD_SIZE", "8", 1);
  const auto all = find_rendezvous("", -1, 0);
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(all->host, "leader");
  EXPECT_EQ(all->port, 1234);
  EXPECT_EQ(all->rank, 5);
  EXPECT_EQ(all->world_size, 8);
  const auto given = find_rendezvous("env://", 2, 0);
  EXPECT_EQ(given->rank, 2);
  EXPECT_EQ(given->world_size, 0);
  ::unsetenv("MASTER_PORT");
  EXPECT_EQ(find_rendezvous("env://", 2, 0).status().code(), Code::invalid_argument);
}

TEST(Rendezvous, EachSessionOfAWorldHasItsOwnKeys) {
  EXPECT_EQ(world_prefix("here", 0, -1), "tensorferry");
  EXPECT_EQ(world_prefix("here", 2, 0), "tensorferry/2/0");
  EXPECT_EQ(world_prefix("here", 2, 1), "tensorferry/2/0");
  EXPECT_EQ(world_prefix("here", 2, 0), "tensorferry/2/1");
  EXPECT_EQ(world_prefix("here", 3, 0), "tensorferry/3/0");
  EXPECT_EQ(world_prefix("there", 2, 0), "tensorferry/2/0");
}

TEST(Rendezvous, WarnsOfALoopbackAddressForSeveralHosts) {
  const auto said = [](const char* method, const char* here, int world_size) {
    ::setenv("LOCAL_WORLD_SIZE", here, 1);
    ::testing::internal::CaptureStderr();
    EXPECT_TRUE(find_rendezvous(method, 0, world_size).ok());
    ::unsetenv("LOCAL_WORLD_SIZE");
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(
      said("tcp://127.0.0.1:29500", "2", 4),
      "tensorferry warning: a world of 4, 2 of them on this host (LOCAL_WORLD_SIZE), meets at the loopback address "
      "127.0.0.1:29500: other hosts cannot reach it. Set MASTER_ADDR to an address of rank 0's host\n");
  EXPECT_EQ(said("tcp://127.0.0.1:29500", "4", 4), "");
  EXPECT_EQ(said("tcp://127.0.0.1:29500", "", 4), "");
  EXPECT_EQ(said("tcp://192.0.2.1:29500", "2", 4), "");
  EXPECT_EQ(said("tcp://127.0.0.1:29500", "2", 0), "");
}

}  // namespace
}  // namespace tensorferry
