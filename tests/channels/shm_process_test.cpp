/// Tests of `shm` between two processes: the memory that is left when one is killed, the memory that a forked child
/// sees, and the memory that many small buffers cost.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "channels/region.h"
#include "channels/shm/shm_channel.h"
#include "tests/agent/forked.h"
#include "tests/agent/patience.h"
#include "tests/channels/shm_maps.h"
#include "tests/conformance/child.h"
#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {
namespace {

using tensorferry::testing::eventually;
using tensorferry::testing::in_child;
using tensorferry::testing::open_descriptors;
using tensorferry::testing::rounds;
using tensorferry::testing::under_sanitizer;

constexpr std::size_t kilobyte = 1 << 10;
constexpr std::size_t megabyte = 1 << 20;

/// One end of the channel in this process.
struct End {
  explicit End(WireEnd::Sockets sockets, shm::Limits limits = {})
      : driver(limits), wire("the other process", driver, {}, *memory, std::move(sockets)) {
    wire.start();
    const auto probed = wire.wait_ready();
    if (!probed || !probed->ok()) std::abort();
  }
  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  ShmDriver driver;
  WireEnd wire;
};

/// Returns the bytes of memory that are resident in this process, including memory that it shares with others.
std::size_t resident() {
  std::ifstream statm("/proc/self/statm");
  std::size_t size = 0, pages = 0;
  statm >> size >> pages;
  return pages * 4096;
}

/// Makes the kernel find no memory for pages that are asked for ahead of time, as it does when it commits no more
/// memory than it has (vm.overcommit_memory=2). A write to such a page would raise SIGBUS.
bool leave_no_memory() {
  constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, from Linux 5.14 on
  std::array<sock_filter, 6> filter{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args) + 2 * sizeof(std::uint64_t)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, populate_write, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

TEST(ShmProcess, ABufferForWhichThereIsNoMemoryIsRefusedAndKillsNobody) {
  const auto child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto memory = cpu_memory();
    ShmDriver driver;
    WirePair pair(driver, driver, {}, *memory, *memory);
    if (!pair.a->wait_ready().value_or(Status(Code::internal, "")).ok() || !leave_no_memory()) ::_exit(77);
    for (const auto bytes : {16 * kilobyte, 20 * megabyte}) {
      Letter letter(*pair.a);  // no other channel would carry it
      const bool taken = letter.offer(memory->filled(bytes, 1));
      if (taken || letter.refusal.find("no memory for") == std::string::npos) ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "the kernel takes no filter";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(ShmProcess, HeldBuffersOutliveAKilledSender) {
  const auto mappings = shared_mappings();
  const auto descriptors = open_descriptors();
  {
    auto [mine, theirs] = connected_sockets();
    Child child(std::move(theirs), mine, [](WireEnd::Sockets sockets) {
      End end(std::move(sockets));
      for (std::uint32_t i = 0; i < 20; ++i) end.wire.send(end.memory->filled(i % 2 ? megabyte : 6 * kilobyte, i));
      end.wire.messages().wait_ended();
      return 0;
    });
    Arrivals held;
    {
      End end(std::move(mine));
      for (int i = 0; i < 20; ++i) {
        const auto arrivals = end.wire.receive();
        ASSERT_EQ(arrivals.size(), 1u);
        held.push_back(arrivals.front());
      }
      child.kill();
      ASSERT_TRUE(end.wire.messages().wait_ended());
      for (std::uint32_t i = 0; i < 20; ++i) EXPECT_TRUE(end.memory->holds(held[i]->buffer, i));
      held[3].reset();  // returns a block to a sender that is dead
    }
    const auto memory = cpu_memory();
    for (std::uint32_t i = 4; i < 20; ++i) {
      EXPECT_TRUE(memory->holds(held[i]->buffer, i));
      memory->fill(held[i]->buffer, 100 + i);
      EXPECT_TRUE(memory->holds(held[i]->buffer, 100 + i));
    }
  }
  EXPECT_EQ(shared_mappings(), mappings);
  EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(ShmProcess, TheSenderReleasesTheBlocksOfAKilledReceiver) {
  const auto mappings = shared_mappings();
  auto [mine, theirs] = connected_sockets();
  Child child(std::move(theirs), mine, [](WireEnd::Sockets sockets) {
    End end(std::move(sockets));
    Arrivals held;
    for (int i = 0; i < 10; ++i) held.push_back(end.wire.receive().front());
    end.wire.send(end.memory->filled(6 * kilobyte, 1));
    end.wire.messages().wait_ended();
    return 0;
  });
  {
    End end(std::move(mine));
    const auto lent = *Regions::of_this_process().make(megabyte);
    end.memory->fill(lent, 3);
    for (std::uint32_t i = 0; i < 9; ++i) end.wire.send(end.memory->filled(megabyte, i));
    Letter letter(end.wire);
    ASSERT_TRUE(letter.offer(lent, {}, Sharing::shared));
    letter.send();
    ASSERT_EQ(end.wire.receive().size(), 1u);
    EXPECT_EQ(end.driver.usage().held, 9 * megabyte);
    child.kill();
    ASSERT_TRUE(end.wire.messages().wait_ended());
    EXPECT_TRUE(eventually([&] { return end.driver.usage().held == 0 && end.driver.usage().idle == 0; }));
    EXPECT_TRUE(end.memory->holds(lent, 3));
  }
  EXPECT_EQ(shared_mappings(), mappings);
}

#ifndef TENSORFERRY_UNDER_TSAN  // under it, the forked child of a process with threads cannot continue

/// A forked copy of this process. It waits until the test tells it to run `life`, which must not allocate (forked.h);
/// its parent continues meanwhile.
class Copy {
 public:
  explicit Copy(const std::function<int()>& life) {
    EXPECT_EQ(::pipe(go_.data()), 0);
    pid_ = ::fork();
    if (pid_ != 0) return;
    char byte = 0;
    ::close(go_[1]);
    (void)!::read(go_[0], &byte, 1);
    ::_exit(life());
  }
  int run() {
    (void)!::write(go_[1], "", 1);
    int status = -1;
    ::waitpid(pid_, &status, 0);
    for (const int fd : go_) ::close(fd);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  std::array<int, 2> go_{};
  pid_t pid_ = -1;
};

class ShmFork : public ::testing::Test {
 protected:
  std::shared_ptr<Arrival> carry(std::size_t bytes, std::uint32_t seed) {
    a.send(memory->filled(bytes, seed));
    return sole_owner(b.receive());
  }
  ShmDriver driver, other;
  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  WirePair pair{driver, other, {}, *memory, *memory};
  WireEnd &a = *pair.a, &b = *pair.b;
};

TEST_F(ShmFork, AChildsOwnersReturnNoBlocks) {
  const auto held = carry(megabyte, 1);
  auto owner = std::make_shared<Buffer>(held->buffer);
  EXPECT_EQ(in_child([&] {
              owner.reset();
              held->buffer = {};
              return 0;
            }),
            0);
  for (std::uint32_t i = 0; i < 10; ++i) carry(megabyte, 10 + i);
  EXPECT_TRUE(memory->holds(held->buffer, 1));
  EXPECT_EQ(driver.usage().held, 2 * megabyte) << "the held block, and the last received one";
}

TEST_F(ShmFork, AChildCanReadBlocksThatItsParentHasReleased) {
  for (const auto bytes : {6 * kilobyte, megabyte}) {
    auto held = carry(bytes, 1);
    Copy copy([&] { return memory->holds(held->buffer, 1) ? 0 : 1; });
    held.reset();
    for (std::uint32_t i = 0; i < 100; ++i) ASSERT_NE(carry(bytes, 10 + i), nullptr);
    EXPECT_EQ(copy.run(), 0) << "the child's tensor changed under it";
  }
  EXPECT_EQ(driver.usage().held, megabyte) << "the last one that came; what is spent is not counted";
}

TEST_F(ShmFork, BlocksReceivedAfterTheForkAreReused) {
  auto held = carry(megabyte, 1);
  held.reset();
  Copy copy([] { return 0; });
  auto first = carry(megabyte, 2);
  const auto* const at = first->buffer.data;
  first.reset();
  EXPECT_EQ(carry(megabyte, 3)->buffer.data, at);
  EXPECT_EQ(copy.run(), 0);
}

TEST_F(ShmFork, AChildMayDestroyItsCopiesOfAllObjects) {
  auto held = carry(megabyte, 1);
  auto lent = Regions::of_this_process().make(megabyte);
  ShmDriver third;
  WirePair more(third, other, {}, *memory, *memory);
  EXPECT_EQ(in_child([&] {
              auto dropped = *lent;
              held.reset();
              lent->owner.reset();
              dropped = {};
              more.a->channel().close(Status(Code::agent_closed, "in a child"));
              third.~ShmDriver();
              return 0;
            }),
            0);
  EXPECT_TRUE(memory->holds(held->buffer, 1));
}

#endif

TEST(ShmProcess, AMillionSmallBuffersTakeTheirBytesAndFewMappings) {
  const auto count = static_cast<std::size_t>(rounds(1'000'000));
  constexpr std::size_t bytes = 5000;
  shm::Limits limits;
  limits.held_bytes = count * 6 * kilobyte;
  auto [mine, theirs] = connected_sockets();
  Child child(std::move(theirs), mine, [count](WireEnd::Sockets sockets) {
    End end(std::move(sockets));
    end.wire.send(end.memory->filled(1, 0));
    std::vector<Buffer> held;
    held.reserve(count);
    const auto before = resident();
    const auto mappings = shared_mappings();
    const auto descriptors = open_descriptors();
    while (held.size() < count) {
      auto arrivals = end.wire.receive();
      if (arrivals.empty()) return 2;
      for (const auto& arrival : arrivals) held.push_back(std::move(arrival->buffer));
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (!end.memory->holds(held[i], static_cast<std::uint32_t>(i % 100))) return 3;
    }
    const auto grown = resident() - before;
    std::printf("%zu buffers of %zu bytes: %.3f of their bytes, %zu mappings\n", count, bytes,
                static_cast<double>(grown) / static_cast<double>(count * bytes), shared_mappings() - mappings);
    std::fflush(stdout);
    if (!under_sanitizer && grown > count * bytes * 13 / 10 + 2 * megabyte) return 4;
    if (shared_mappings() - mappings > count * bytes / (4 * megabyte) + 10) return 5;
    if (open_descriptors() > descriptors + 5) return 6;
    end.wire.send(end.memory->filled(1, 0));
    end.wire.messages().wait_ended();
    return 0;
  });
  End end(std::move(mine), limits);
  ASSERT_EQ(end.wire.receive().size(), 1u);
  std::vector<Buffer> sources;
  for (std::uint32_t seed = 0; seed < 100; ++seed) sources.push_back(end.memory->filled(bytes, seed));
  for (std::size_t sent = 0; sent < count;) {
    Letter letter(end.wire);
    letter.only_channel = false;
    while (letter.tickets.size() < 1000 && sent < count) {
      if (letter.offer(sources[sent % 100]))
        ++sent;
      else
        std::this_thread::sleep_for(std::chrono::microseconds(100));  // no warm block yet
    }
    letter.send();
  }
  const bool accepted = !end.wire.receive().empty();
  end.wire.finish();
  EXPECT_EQ(child.wait(), 0);
  EXPECT_TRUE(accepted);
}

}  // namespace
}  // namespace tensorferry::conformance
