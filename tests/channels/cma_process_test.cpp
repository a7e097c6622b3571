/// Tests of `cma` between two processes: refusals by the kernel, processes that end, and namespaces.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "channels/cma/cma_channel.h"
#include "channels/cma/process.h"
#include "tests/agent/forked.h"
#include "tests/channels/forbid_reading.h"
#include "tests/conformance/child.h"
#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {
namespace {

using tensorferry::testing::forbid_reading;
using tensorferry::testing::not_allowed;
using ::testing::HasSubstr;

constexpr std::size_t megabyte = 1 << 20;

/// One end of the channel in this process.
struct End {
  explicit End(WireEnd::Sockets sockets) : wire("the other process", driver, {}, *memory, std::move(sockets)) {
    wire.start();
  }
  std::unique_ptr<DeviceMemory> memory = cpu_memory();
  CmaDriver driver;
  WireEnd wire;
};

bool contains(const Status& status, std::string_view text) {
  return status.what().find(text) != std::string_view::npos;
}

class CmaProcess : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto refusal = cma::own_scope_refusal()) GTEST_SKIP() << *refusal;
  }
  std::pair<WireEnd::Sockets, WireEnd::Sockets> sockets = connected_sockets();
};

TEST_F(CmaProcess, IsRemovedWithAReasonIfTheKernelRefuses) {
  Child child(std::move(sockets.second), sockets.first, [](WireEnd::Sockets mine) {
    if (!forbid_reading()) return not_allowed;
    End end(std::move(mine));
    const auto probed = end.wire.wait_ready();
    if (!probed || probed->code() != Code::channel_unavailable) return 1;
    if (!contains(*probed, "process_vm_readv: Operation not permitted") || !contains(*probed, "seccomp")) return 2;
    Letter letter(end.wire);
    if (letter.offer(end.memory->filled(megabyte, 1))) return 3;
    return 0;
  });
  End end(std::move(sockets.first));
  end.wire.messages().wait_ended();
  const int seen = child.wait();
  if (seen == not_allowed) GTEST_SKIP() << "the kernel takes no seccomp filter from this process";
  EXPECT_EQ(seen, 0);
}

TEST_F(CmaProcess, ALaterRefusalLosesNoBufferAndEndsTheUseOfTheChannel) {
  Child child(std::move(sockets.second), sockets.first, [](WireEnd::Sockets mine) {
    End end(std::move(mine));
    if (!end.wire.wait_ready()->ok()) return 1;
    for (std::uint32_t i = 0; i < 6; ++i) {
      const auto arrivals = end.wire.receive();
      if (arrivals.size() != 1 || !arrivals.front()->landed.wait()->ok()) return 2;
      if (!end.memory->holds(arrivals.front()->buffer, i)) return 3;
      if (i == 1 && !forbid_reading()) return not_allowed;
      end.wire.send(end.memory->filled(1, 0));  // asks for the next buffer, if the channel still takes offers
    }
    const auto probed = end.wire.wait_ready();
    if (probed->ok() || !contains(*probed, "process_vm_readv: Operation not permitted")) return 4;
    Letter letter(end.wire);
    if (letter.offer(end.memory->filled(megabyte, 1))) return 5;
    return 0;
  });
  End end(std::move(sockets.first));
  ASSERT_TRUE(end.wire.wait_ready()->ok());
  for (std::uint32_t i = 0; i < 6; ++i) {
    const auto released = end.wire.send(end.memory->filled(megabyte + i, i));
    if (released.wait_name() != "Ok") break;
    if (i < 2 && end.wire.receive().empty()) break;  // the child forbids the reading before the next buffer
  }
  const int seen = child.wait();
  if (seen == not_allowed) GTEST_SKIP() << "the kernel takes no seccomp filter from this process";
  EXPECT_EQ(seen, 0);
}

TEST_F(CmaProcess, AnEndedProcessIsNotReached) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const auto pid = ::fork();
  if (pid == 0) {
    char byte = 0;
    ::close(pipe[1]);
    (void)!::read(pipe[0], &byte, 1);
    ::_exit(0);
  }
  const auto started = cma::started_of(pid);
  ASSERT_TRUE(started.has_value());
  const auto process = cma::Process::find({pid, *started});
  ASSERT_TRUE(process.ok()) << process.status().text();
  EXPECT_TRUE(process->alive());
  EXPECT_FALSE(cma::Process::find({pid, *started + 1}).ok()) << "one that began at another time";
  ::close(pipe[0]);
  ::close(pipe[1]);
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(process->alive()) << "it has not been reaped yet";
  std::byte byte{};
  EXPECT_EQ(process->read(&byte, reinterpret_cast<std::uintptr_t>(&byte), 1), ESRCH);
  ::waitpid(pid, nullptr, 0);
  EXPECT_FALSE(process->alive());
  EXPECT_FALSE(cma::Process::find({pid, *started}).ok());
}

TEST_F(CmaProcess, AProcessIsAliveAlsoToAThreadThatSignalsInterrupt) {
  static std::atomic<int> signals{0};
  struct sigaction counts {};
  struct sigaction before {};
  counts.sa_handler = [](int) { ++signals; };
  ASSERT_EQ(::sigaction(SIGALRM, &counts, &before), 0);
  const auto self = cma::own_identity();
  ASSERT_TRUE(self.has_value());
  const auto process = cma::Process::find(*self);
  ASSERT_TRUE(process.ok()) << process.status().text();
  const itimerval often{{0, 20}, {0, 20}}, never{};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
  bool alive = true;
  while (alive && signals < 5000) alive = process->alive();
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  EXPECT_TRUE(alive);
}

/// Returns the descriptor that the driver gives in a grandchild process, or the driver's reason if it gives none. The
/// child calls `enter`, which moves it into other namespaces; if that fails, the reason is "". If `mounts` is true, the
/// grandchild has its own mount namespace, and mounts the /proc of its pid namespace there.
std::variant<Bytes, Refusal> descriptor_of_one_who(const std::function<bool()>& enter, bool mounts) {
  std::array<int, 2> pipe{};
  EXPECT_EQ(::pipe(pipe.data()), 0);
  const auto child = ::fork();
  if (child == 0) {
    if (!enter()) ::_exit(not_allowed);
    const auto grandchild = ::fork();  // the first process in a new pid namespace
    if (grandchild != 0) {
      int status = -1;
      ::waitpid(grandchild, &status, 0);
      ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
    }
    if (mounts) {
      ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
      ::mount("proc", "/proc", "proc", 0, nullptr);
    }
    const auto said = CmaDriver().descriptor({});
    const auto* bytes = std::get_if<Bytes>(&said);
    const auto text = bytes ? std::string(text_of(*bytes)) : std::get<Refusal>(said).reason;
    (void)!::write(pipe[1], text.data(), text.size());
    ::_exit(bytes ? 0 : 1);
  }
  ::close(pipe[1]);
  std::string text(4096, 0);
  const auto got = ::read(pipe[0], text.data(), text.size());
  ::close(pipe[0]);
  text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  int status = -1;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
    const auto view = view_of(text);
    return Bytes(view.begin(), view.end());
  }
  return Refusal{text};
}

/// Returns a function that moves the process into new namespaces. It adds a user namespace if the kernel requires one.
std::function<bool()> unshares(int what) {
  return [what] { return ::unshare(what) == 0 || ::unshare(what | CLONE_NEWUSER) == 0; };
}

TEST_F(CmaProcess, AnotherPidNamespaceIsNotReached) {
  CmaDriver driver;
  const auto mine = std::get<Bytes>(driver.descriptor({}));
  const auto theirs = descriptor_of_one_who(unshares(CLONE_NEWPID | CLONE_NEWNS), true);
  if (const auto* refusal = std::get_if<Refusal>(&theirs)) {
    if (refusal->reason.empty()) GTEST_SKIP() << "this process may not make a pid namespace";
    FAIL() << refusal->reason;
  }
  const auto refusal = driver.reaches(mine, std::get<Bytes>(theirs));
  ASSERT_TRUE(refusal.has_value());
  EXPECT_THAT(refusal->reason, HasSubstr("another pid namespace"));
}

TEST_F(CmaProcess, ProcOfAnotherPidNamespaceGivesNoDescriptor) {
  const auto said = descriptor_of_one_who([] { return ::unshare(CLONE_NEWPID) == 0; }, false);
  ASSERT_TRUE(std::holds_alternative<Refusal>(said));
  const auto reason = std::get<Refusal>(said).reason;
  if (reason.empty()) GTEST_SKIP() << "this process may not make a pid namespace";
  EXPECT_THAT(reason, HasSubstr("/proc is missing, or belongs to another pid namespace"));
}

TEST_F(CmaProcess, AnotherUserNamespaceIsNotReached) {
  CmaDriver driver;
  const auto mine = std::get<Bytes>(driver.descriptor({}));
  const auto theirs = descriptor_of_one_who([] { return ::unshare(CLONE_NEWUSER) == 0; }, false);
  if (const auto* refusal = std::get_if<Refusal>(&theirs)) {
    if (refusal->reason.empty()) GTEST_SKIP() << "this process may not make a user namespace";
    FAIL() << refusal->reason;
  }
  const auto refusal = driver.reaches(mine, std::get<Bytes>(theirs));
  ASSERT_TRUE(refusal.has_value());
  EXPECT_THAT(refusal->reason, HasSubstr("another user namespace"));
}

}  // namespace
}  // namespace tensorferry::conformance
