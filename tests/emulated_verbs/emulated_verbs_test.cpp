// What a test can make the emulated cards do, and how the library describes them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "tests/agent/patience.h"
#include "tests/channels/rdma_ends.h"
#include "tests/emulated_verbs/control.h"

namespace tensorferry::rdma {
namespace {

using emulated_verbs::controls;

std::vector<CardPort> chosen(const Options& options = {}) {
  auto found = usable_ports(options);
  EXPECT_TRUE(std::holds_alternative<std::vector<CardPort>>(found)) << std::get<Refusal>(found).reason;
  return std::get<0>(std::move(found));
}

std::string reason(const Options& options) {
  const auto found = usable_ports(options);
  const auto* const refusal = std::get_if<Refusal>(&found);
  return refusal == nullptr ? std::string() : refusal->reason;
}

TEST(EmulatedCards, HaveRoutableGidsOfRoceV2) {
  ASSERT_NE(verbs(), nullptr) << why_missing();
  const auto all = chosen();
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].device, "emu0");
  EXPECT_EQ(all[1].device, "emu1");
  for (const auto& port : all) {
    EXPECT_EQ(port.kind, GidKind::roce_v2);
    EXPECT_EQ(port.gid_index, 3);
    EXPECT_TRUE(routable(port.gid));
    EXPECT_EQ(port.gigabits, 100);
    EXPECT_EQ(port.mtu, IBV_MTU_4096);
    EXPECT_EQ(port.numa_node, 0);
  }
  EXPECT_EQ(text_of(all[1].gid), "10.99.1.1");
  EXPECT_GT(distance(all[0].pci_path, all[1].pci_path), 0);
}

TEST(EmulatedCards, AreChosenByTheOptions) {
  Options options;
  options.devices = "emu1:1, emu0";
  const auto both = chosen(options);
  ASSERT_EQ(both.size(), 2U);
  EXPECT_EQ(both[0].device, "emu1");
  options.devices = "emu1";
  options.gid_index = 0;
  const auto one = chosen(options);
  ASSERT_EQ(one.size(), 1U);
  EXPECT_EQ(one[0].kind, GidKind::roce_v1);
  EXPECT_FALSE(routable(one[0].gid));
  options.gid_index = 9;
  EXPECT_NE(reason(options).find("emu1:1 has no GID at index 9"), std::string::npos) << reason(options);
  options.devices = "mlx5_0";
  EXPECT_NE(reason(options).find("emu0, emu1"), std::string::npos) << reason(options);
}

TEST(EmulatedCards, ThatCannotBeUsedSayWhy) {
  ASSERT_NE(controls().set_port, nullptr);
  ASSERT_EQ(controls().set_port("emu0", 1, 0), 0);
  ASSERT_EQ(controls().set_port("emu1", 1, 0), 0);
  EXPECT_NE(reason({}).find("emu0:1 is down (no link); emu1:1 is down"), std::string::npos) << reason({});
  ::setenv("EMULATED_VERBS_NO_RIGHTS", "1", 1);
  EXPECT_NE(reason({}).find("/dev/infiniband/uverbs0"), std::string::npos) << reason({});
  EXPECT_NE(reason({}).find("Permission denied"), std::string::npos) << reason({});
  ::unsetenv("EMULATED_VERBS_NO_RIGHTS");
  ASSERT_EQ(controls().set_port("emu1", 1, 1), 0);
  EXPECT_EQ(chosen().size(), 1U);
}

/// Two connected ends on the first card.
struct Ends {
  explicit Ends(std::size_t bytes = 1 << 20)
      : mine(near.verbs(), near.domain(), bytes, End::all_rights),
        theirs(far.verbs(), far.domain(), bytes, End::all_rights) {
    near.connect(far.address());
    far.connect(near.address());
  }
  int read(std::size_t bytes) {
    return near.post(IBV_WR_RDMA_READ, 1, mine.piece(0, bytes), theirs.address(), theirs.rkey());
  }
  End near, far;
  Registered mine, theirs;
};

/// Waits until a transfer is held in its middle.
void await_stall() {
  ASSERT_TRUE(testing::eventually([] { return controls().stalled() > 0; }));
}

ibv_async_event event_of(End& end) {
  ibv_async_event event{};
  EXPECT_EQ(end.verbs().get_async_event(end.context(), &event), 0);
  end.verbs().ack_async_event(&event);
  return event;
}

TEST(EmulatedCards, APortThatGoesDownUsesUpTheRetriesOfWhatIsUnderWay) {
  Ends ends;
  controls().stall(1);
  ASSERT_EQ(ends.read(1 << 20), 0);
  await_stall();
  ASSERT_EQ(controls().set_port("emu0", 1, 0), 0);
  const auto down = event_of(ends.near);
  EXPECT_EQ(down.event_type, IBV_EVENT_PORT_ERR);
  EXPECT_EQ(down.element.port_num, 1);
  controls().stall(0);
  EXPECT_EQ(ends.near.wait().status, IBV_WC_RETRY_EXC_ERR);
  ASSERT_EQ(controls().set_port("emu0", 1, 1), 0);
  EXPECT_EQ(event_of(ends.near).event_type, IBV_EVENT_PORT_ACTIVE);
}

TEST(EmulatedCards, APortThatComesUpInTimeLosesNothing) {
  Ends ends;
  ASSERT_EQ(controls().set_port("emu0", 1, 0), 0);
  ASSERT_EQ(ends.read(1 << 20), 0);
  ASSERT_EQ(controls().set_port("emu0", 1, 1), 0);
  EXPECT_EQ(ends.near.wait().status, IBV_WC_SUCCESS);
}

TEST(EmulatedCards, ARevokedRegistrationEndsATransferInItsMiddle) {
  Ends ends;
  controls().stall(1);
  ASSERT_EQ(ends.read(1 << 20), 0);
  await_stall();
  ASSERT_EQ(controls().revoke(ends.theirs.rkey()), 0);
  controls().stall(0);
  EXPECT_EQ(ends.near.wait().status, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(event_of(ends.far).event_type, IBV_EVENT_QP_ACCESS_ERR);
  EXPECT_EQ(controls().revoke(ends.theirs.rkey()), ENOENT);
}

TEST(EmulatedCards, AFailedQueuePairFlushesWhatIsUnderWay) {
  Ends ends;
  controls().stall(1);
  ASSERT_EQ(ends.read(1 << 20), 0);
  await_stall();
  ASSERT_EQ(controls().fail_queue_pair(ends.near.pair()->qp_num), 0);
  controls().stall(0);
  EXPECT_EQ(ends.near.wait().status, IBV_WC_WR_FLUSH_ERR);
  const auto event = event_of(ends.near);
  EXPECT_EQ(event.event_type, IBV_EVENT_QP_FATAL);
  EXPECT_EQ(event.element.qp, ends.near.pair());
}

TEST(EmulatedCards, NoMoreMemoryIsRegisteredThanTheLimit) {
  End end;
  controls().limit_memory(8192);
  std::vector<std::byte> bytes(8193);
  EXPECT_EQ(register_memory(end.verbs(), end.domain(), bytes.data(), bytes.size(), End::all_rights), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_EQ(status_of(ENOMEM, "registering memory").code(), Code::resource_exhausted);
  {
    const Registered fits(end.verbs(), end.domain(), 8192, End::all_rights);
    EXPECT_EQ(controls().registered_bytes(), 8192U);
  }
  EXPECT_EQ(controls().registered_bytes(), 0U);
}

TEST(EmulatedCards, PlacesOfTheSendQueueAreFreedByPollsOnly) {
  EndSettings settings;
  settings.send_depth = 2;
  End near(settings), far(settings);
  near.connect(far.address());
  far.connect(near.address());
  Registered mine(near.verbs(), near.domain(), 100, End::all_rights);
  Registered theirs(far.verbs(), far.domain(), 100, End::all_rights);
  const auto write = [&](unsigned flags) {
    return near.post(IBV_WR_RDMA_WRITE, 1, mine.piece(0, 100), theirs.address(), theirs.rkey(), flags);
  };
  ASSERT_EQ(ibv_req_notify_cq(near.queue(), 0), 0);
  ASSERT_EQ(write(0), 0);
  ASSERT_EQ(write(IBV_SEND_SIGNALED), 0);
  ibv_cq* queue = nullptr;
  void* ignored = nullptr;
  ASSERT_EQ(near.verbs().get_cq_event(near.channel(), &queue, &ignored), 0);  // both writes have completed
  near.verbs().ack_cq_events(queue, 1);
  EXPECT_EQ(write(0), ENOMEM);
  near.wait();
  EXPECT_EQ(write(0), 0);
  EXPECT_EQ(write(0), 0);
}

TEST(EmulatedCards, AFailedEntryHoldsNothingButItsRequest) {
  Ends ends;
  ASSERT_EQ(ends.near.to(IBV_QPS_ERR), 0);
  ASSERT_EQ(ends.read(100), 0);
  const auto entry = ends.near.wait();
  EXPECT_EQ(entry.status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_NE(entry.opcode, IBV_WC_RDMA_READ);
}

TEST(EmulatedCards, WhatIsInUseIsNotDestroyed) {
  Ends ends;
  const auto& verbs = ends.near.verbs();
  EXPECT_EQ(verbs.destroy_cq(ends.near.queue()), EBUSY);
  EXPECT_EQ(verbs.destroy_comp_channel(ends.near.channel()), EBUSY);
  EXPECT_EQ(verbs.dealloc_pd(ends.near.domain()), EBUSY);
  EXPECT_EQ(controls().queue_pairs(), 2U);
}

/// Makes another queue pair of an end.
ibv_qp* another_pair(End& end) {
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = end.queue();
  attributes.cap = {1, 1, 1, 1, 0};
  attributes.qp_type = IBV_QPT_RC;
  return end.verbs().create_qp(end.domain(), &attributes);
}

TEST(EmulatedCards, AQueuePairThatFailsWhileItIsDestroyedLeavesNoEvent) {
  End end;
  std::atomic<bool> over{false}, failed{false};
  std::thread failing([&] {
    while (!over) {
      if (controls().fail_queue_pairs(2) > 0) failed = true;
    }
  });
  while (!failed) std::this_thread::yield();
  for (int round = 0; round < 2000; ++round) end.verbs().destroy_qp(another_pair(end));
  over = true;
  failing.join();
  ASSERT_EQ(event_of(end).element.qp, end.pair());  // it was failed, too
  ::fcntl(end.context()->async_fd, F_SETFL, O_NONBLOCK);
  ibv_async_event event{};
  EXPECT_NE(end.verbs().get_async_event(end.context(), &event), 0);
}

TEST(EmulatedCards, AQueuePairIsDestroyedWhenItsEventsAreAcknowledged) {
  End end;
  ibv_qp* const pair = another_pair(end);
  ASSERT_EQ(controls().fail_queue_pair(pair->qp_num), 0);
  ibv_async_event event{};
  ASSERT_EQ(end.verbs().get_async_event(end.context(), &event), 0);
  const auto pairs = controls().queue_pairs();
  std::atomic<bool> acknowledged{false}, waited{false};
  std::thread destroying([&] {
    end.verbs().destroy_qp(pair);
    waited = acknowledged.load();
  });
  EXPECT_TRUE(testing::eventually([&] { return controls().queue_pairs() < pairs; })) << "it is being destroyed";
  acknowledged = true;
  end.verbs().ack_async_event(&event);
  destroying.join();
  EXPECT_TRUE(waited);
}

TEST(EmulatedCards, MemoryThatIsUnmappedAfterwardsEndsTheTransferOnly) {
  End near, far;
  near.connect(far.address());
  far.connect(near.address());
  Registered mine(near.verbs(), near.domain(), 4096, End::all_rights);
  constexpr std::size_t bytes = 1 << 20;
  void* const pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  ibv_mr* const region = register_memory(far.verbs(), far.domain(), pages, bytes, End::all_rights);
  ASSERT_NE(region, nullptr);
  ASSERT_EQ(::mprotect(pages, bytes, PROT_NONE), 0);  // stays reserved, so that nothing else is mapped there
  ASSERT_EQ(near.post(IBV_WR_RDMA_READ, 1, mine.piece(0, 4096), reinterpret_cast<std::uintptr_t>(pages), region->rkey),
            0);
  EXPECT_EQ(near.wait().status, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(far.verbs().dereg_mr(region), 0);
  ::munmap(pages, bytes);
}

}  // namespace
}  // namespace tensorferry::rdma
