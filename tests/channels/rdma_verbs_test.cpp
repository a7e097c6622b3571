// What the channels over RDMA cards take from verbs. It runs on a real card, on Soft-RoCE (make test-rdma),
// or the emulated ones of tests/emulated_verbs. So the emulated cards are known to do what the kernel's do.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <memory>

#include "tests/channels/rdma_ends.h"

namespace tensorferry::rdma {
namespace {

using namespace std::chrono_literals;

class RdmaVerbs : public testing::Test {
 protected:
  void SetUp() override {
    const auto ports = usable_ports(Options());
    if (const auto* const refusal = std::get_if<Refusal>(&ports)) GTEST_SKIP() << refusal->reason;
  }

  /// Two connected ends, on different cards if there are two, and memory of `bytes` bytes at each.
  struct Two {
    explicit Two(std::size_t bytes = 4096, EndSettings settings = {}, unsigned rights = End::all_rights)
        : near(settings, ports().front()),
          far(settings, ports().back()),
          mine(near.verbs(), near.domain(), bytes, End::all_rights),
          theirs(far.verbs(), far.domain(), bytes, rights) {
      near.connect(far.address());
      far.connect(near.address());
      mine.fill(1);
      theirs.fill(2);
    }
    int read(std::uint64_t id, std::size_t bytes, unsigned flags = IBV_SEND_SIGNALED) {
      return near.post(IBV_WR_RDMA_READ, id, mine.piece(0, bytes), theirs.address(), theirs.rkey(), flags);
    }
    int write(std::uint64_t id, std::size_t bytes, unsigned flags = IBV_SEND_SIGNALED) {
      return near.post(IBV_WR_RDMA_WRITE, id, mine.piece(0, bytes), theirs.address(), theirs.rkey(), flags);
    }
    End near, far;
    Registered mine, theirs;
  };
};

TEST_F(RdmaVerbs, ReadsAndWritesBytesOfEverySize) {
  Two two(3 << 20);
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{4096}, std::size_t{(1 << 20) + 3}, std::size_t{3 << 20}}) {
    two.mine.fill(1);
    two.theirs.fill(2);
    ASSERT_EQ(two.read(7, bytes), 0);
    const auto entry = two.near.wait();
    ASSERT_EQ(entry.status, IBV_WC_SUCCESS) << two.near.verbs().wc_status_str(entry.status);
    EXPECT_EQ(entry.opcode, IBV_WC_RDMA_READ);
    EXPECT_EQ(entry.wr_id, 7U);
    EXPECT_EQ(std::memcmp(two.mine.bytes().data(), two.theirs.bytes().data(), bytes), 0);
    two.mine.fill(3);
    ASSERT_EQ(two.write(8, bytes), 0);
    ASSERT_EQ(two.near.wait().status, IBV_WC_SUCCESS);
    EXPECT_EQ(std::memcmp(two.mine.bytes().data(), two.theirs.bytes().data(), bytes), 0);
  }
}

TEST_F(RdmaVerbs, AWriteWithAnImmediateCompletesAReceiveAfterItsBytes) {
  Two two;
  ASSERT_EQ(two.far.post_receive(11, {}), 0);
  ASSERT_EQ(two.near.post(IBV_WR_RDMA_WRITE_WITH_IMM, 12, two.mine.piece(0, 4096), two.theirs.address(),
                          two.theirs.rkey(), IBV_SEND_SIGNALED, 0x01020304),
            0);
  const auto received = two.far.wait();
  EXPECT_EQ(received.status, IBV_WC_SUCCESS);
  EXPECT_EQ(received.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(received.wr_id, 11U);
  EXPECT_EQ(received.byte_len, 4096U);
  EXPECT_EQ(received.imm_data, 0x01020304U);
  EXPECT_NE(received.wc_flags & IBV_WC_WITH_IMM, 0U);
  EXPECT_EQ(two.mine.bytes(), two.theirs.bytes());
  EXPECT_EQ(two.near.wait().opcode, IBV_WC_RDMA_WRITE);
}

TEST_F(RdmaVerbs, ReceivesTakeMessagesInTheOrderOfTheirPosts) {
  Two two;
  for (int at = 0; at < 4; ++at) {
    ASSERT_EQ(two.far.post_receive(20 + at, two.theirs.piece(1000 * at, 1000)), 0);
  }
  for (int at = 0; at < 4; ++at) {
    ASSERT_EQ(two.near.post(IBV_WR_SEND, 30 + at, two.mine.piece(0, 100 + at)), 0);
  }
  for (int at = 0; at < 4; ++at) {
    const auto entry = two.far.wait();
    EXPECT_EQ(entry.wr_id, 20U + at);
    EXPECT_EQ(entry.byte_len, 100U + at);
    EXPECT_EQ(entry.opcode, IBV_WC_RECV);
    EXPECT_EQ(std::memcmp(&two.theirs.bytes()[1000 * at], two.mine.bytes().data(), 100 + at), 0);
  }
  for (int at = 0; at < 4; ++at) EXPECT_EQ(two.near.wait().wr_id, 30U + at);
}

TEST_F(RdmaVerbs, InlineBytesAreTakenAtThePost) {
  Two two;
  char text[] = "small";
  const ibv_sge piece{reinterpret_cast<std::uintptr_t>(text), sizeof text, 0};  // no key is looked at
  ASSERT_EQ(two.near.post(IBV_WR_RDMA_WRITE, 1, piece, two.theirs.address(), two.theirs.rkey(),
                          IBV_SEND_SIGNALED | IBV_SEND_INLINE),
            0);
  text[0] = 'S';
  ASSERT_EQ(two.near.wait().status, IBV_WC_SUCCESS);
  EXPECT_STREQ(reinterpret_cast<const char*>(two.theirs.bytes().data()), "small");
}

TEST_F(RdmaVerbs, PiecesOfOneRequestComeFromSeveralPlaces) {
  Two two;
  ibv_sge pieces[] = {two.mine.piece(100, 10), two.mine.piece(2000, 500)};
  ibv_send_wr work{}, *bad = nullptr;
  work.sg_list = pieces;
  work.num_sge = 2;
  work.opcode = IBV_WR_RDMA_WRITE;
  work.send_flags = IBV_SEND_SIGNALED;
  work.wr.rdma.remote_addr = two.theirs.address(5);
  work.wr.rdma.rkey = two.theirs.rkey();
  ASSERT_EQ(ibv_post_send(two.near.pair(), &work, &bad), 0);
  ASSERT_EQ(two.near.wait().status, IBV_WC_SUCCESS);
  EXPECT_EQ(std::memcmp(&two.theirs.bytes()[5], &two.mine.bytes()[100], 10), 0);
  EXPECT_EQ(std::memcmp(&two.theirs.bytes()[15], &two.mine.bytes()[2000], 500), 0);
}

TEST_F(RdmaVerbs, RequestsWithoutASignalCompleteWithALaterOne) {
  Two two;
  ASSERT_EQ(two.write(1, 100, 0), 0);
  ASSERT_EQ(two.write(2, 100, 0), 0);
  ASSERT_EQ(two.write(3, 100), 0);
  EXPECT_EQ(two.near.wait().wr_id, 3U);
  ASSERT_EQ(two.write(4, 100), 0);
  EXPECT_EQ(two.near.wait().wr_id, 4U) << "and not one of the requests without a signal";
}

TEST_F(RdmaVerbs, AWrongKeyFailsBothEndsAndFlushesWhatFollows) {
  Two two;
  ASSERT_EQ(two.near.post(IBV_WR_RDMA_READ, 1, two.mine.piece(0, 100), two.theirs.address(), two.theirs.rkey() ^ 0x5a),
            0);
  ASSERT_EQ(two.write(2, 100, 0), 0);
  EXPECT_EQ(two.near.wait().status, IBV_WC_REM_ACCESS_ERR);
  const auto flushed = two.near.wait();
  EXPECT_EQ(flushed.status, IBV_WC_WR_FLUSH_ERR);  // though it was not signaled
  EXPECT_EQ(flushed.wr_id, 2U);
  EXPECT_EQ(two.near.state(), IBV_QPS_ERR);
  EXPECT_EQ(two.far.state(), IBV_QPS_ERR);
}

TEST_F(RdmaVerbs, ABoundIsKept) {
  Two two;
  ASSERT_EQ(two.near.post(IBV_WR_RDMA_WRITE, 1, two.mine.piece(0, 100), two.theirs.address(4000), two.theirs.rkey()),
            0);
  EXPECT_EQ(two.near.wait().status, IBV_WC_REM_ACCESS_ERR);
}

TEST_F(RdmaVerbs, ARegistrationGrantsNoMoreThanItSays) {
  Two reading(4096, {}, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  ASSERT_EQ(reading.read(1, 100), 0);
  EXPECT_EQ(reading.near.wait().status, IBV_WC_REM_ACCESS_ERR);
  Two writing(4096, {}, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  ASSERT_EQ(writing.write(1, 100), 0);
  EXPECT_EQ(writing.near.wait().status, IBV_WC_REM_ACCESS_ERR);
}

TEST_F(RdmaVerbs, AQueuePairGrantsNoMoreThanItSays) {
  EndSettings settings;
  settings.rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  Two two(4096, settings);
  ASSERT_EQ(two.read(1, 100), 0);
  EXPECT_EQ(two.near.wait().status, IBV_WC_REM_INV_REQ_ERR);
}

TEST_F(RdmaVerbs, ALocalKeyIsCheckedToo) {
  Two two;
  auto piece = two.mine.piece(0, 100);
  piece.lkey ^= 0x5a;
  ASSERT_EQ(two.near.post(IBV_WR_RDMA_WRITE, 1, piece, two.theirs.address(), two.theirs.rkey()), 0);
  const auto status = two.near.wait().status;
  EXPECT_TRUE(status == IBV_WC_LOC_PROT_ERR || status == IBV_WC_LOC_QP_OP_ERR) << status;  // the latter on Soft-RoCE
}

TEST_F(RdmaVerbs, ADeregisteredKeyIsWrong) {
  Two two;
  const auto key = two.theirs.rkey();
  two.theirs.deregister();
  ASSERT_EQ(two.near.post(IBV_WR_RDMA_READ, 1, two.mine.piece(0, 100), two.theirs.address(), key), 0);
  EXPECT_EQ(two.near.wait().status, IBV_WC_REM_ACCESS_ERR);
}

TEST_F(RdmaVerbs, AKeyOfAnotherDomainIsWrong) {
  Two two;
  ibv_pd* const other = two.far.verbs().alloc_pd(two.far.context());
  {
    Registered elsewhere(two.far.verbs(), other, 4096, End::all_rights);
    ASSERT_EQ(two.near.post(IBV_WR_RDMA_READ, 1, two.mine.piece(0, 100), elsewhere.address(), elsewhere.rkey()), 0);
    EXPECT_EQ(two.near.wait().status, IBV_WC_REM_ACCESS_ERR);
  }
  EXPECT_EQ(two.far.verbs().dealloc_pd(other), 0);
}

TEST_F(RdmaVerbs, AFullSendQueueTakesNoMore) {
  EndSettings settings;
  settings.send_depth = 4;
  Two two(4096, settings);
  ASSERT_EQ(two.far.to(IBV_QPS_ERR), 0);  // nothing is answered any more
  int posted = 0, error = 0;
  while (posted < 10000 && (error = two.write(posted, 100)) == 0) ++posted;
  EXPECT_EQ(error, ENOMEM);
  EXPECT_GE(posted, 4);
}

TEST_F(RdmaVerbs, ASenderWaitsUntilAReceiveIsPosted) {
  Two two;
  ASSERT_EQ(two.near.post(IBV_WR_SEND, 1, two.mine.piece(0, 100)), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // usually the sender asks again meanwhile
  ASSERT_EQ(two.far.post_receive(2, two.theirs.piece(0, 4096)), 0);
  EXPECT_EQ(two.near.wait().status, IBV_WC_SUCCESS);
  EXPECT_EQ(two.far.wait().byte_len, 100U);
}

TEST_F(RdmaVerbs, ASenderWithFewRetriesGivesUpWithoutAReceive) {
  EndSettings settings;
  settings.rnr_retry = 1;
  Two two(4096, settings);
  ASSERT_EQ(two.near.post(IBV_WR_SEND, 1, two.mine.piece(0, 100)), 0);
  EXPECT_EQ(two.near.wait().status, IBV_WC_RNR_RETRY_EXC_ERR);
}

TEST_F(RdmaVerbs, AMessageLongerThanItsReceiveFailsBothEnds) {
  Two two;
  ASSERT_EQ(two.far.post_receive(1, two.theirs.piece(0, 50)), 0);
  ASSERT_EQ(two.near.post(IBV_WR_SEND, 2, two.mine.piece(0, 100)), 0);
  const auto far = two.far.wait().status, near = two.near.wait().status;
  EXPECT_TRUE(far == IBV_WC_LOC_LEN_ERR || far == IBV_WC_LOC_QP_OP_ERR) << far;  // the latter on Soft-RoCE
  EXPECT_TRUE(near == IBV_WC_REM_INV_REQ_ERR || near == IBV_WC_REM_OP_ERR) << near;
}

TEST_F(RdmaVerbs, TheErrorStateFlushesInOrder) {
  Two two;
  for (int at = 0; at < 3; ++at) ASSERT_EQ(two.near.post_receive(40 + at, two.mine.piece(0, 100)), 0);
  ASSERT_EQ(two.near.to(IBV_QPS_ERR), 0);
  for (int at = 0; at < 3; ++at) {
    const auto entry = two.near.wait();
    EXPECT_EQ(entry.status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(entry.wr_id, 40U + at);
  }
  ASSERT_EQ(two.write(50, 100), 0);
  const auto entry = two.near.wait();
  EXPECT_EQ(entry.status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(entry.wr_id, 50U);
}

TEST_F(RdmaVerbs, AnAbsentPeerUsesUpTheRetries) {
  Two two;
  two.far.destroy_pair();
  ASSERT_EQ(two.read(1, 100), 0);
  EXPECT_EQ(two.near.wait().status, IBV_WC_RETRY_EXC_ERR);
}

TEST_F(RdmaVerbs, AResetQueuePairConnectsAgain) {
  Two two;
  ASSERT_EQ(two.near.to(IBV_QPS_ERR), 0);
  ASSERT_EQ(two.near.to(IBV_QPS_RESET), 0);
  ASSERT_EQ(two.far.to(IBV_QPS_RESET), 0);
  two.near.connect(two.far.address());
  two.far.connect(two.near.address());
  ASSERT_EQ(two.read(1, 4096), 0);
  EXPECT_EQ(two.near.wait().status, IBV_WC_SUCCESS);
  EXPECT_EQ(two.mine.bytes(), two.theirs.bytes());
}

TEST_F(RdmaVerbs, StatesComeInTheirOrder) {
  End one({}, ports().front()), two({}, ports().back());
  EXPECT_NE(one.to_send(), 0);
  EXPECT_NE(one.to_receive(two.address()), 0);
  EXPECT_NE(one.post_receive(1, {}), 0);
  ASSERT_EQ(one.to_init(), 0);
  EXPECT_EQ(one.post_receive(1, {}), 0);
  EXPECT_NE(one.to_send(), 0);
  ASSERT_EQ(one.to_receive(two.address()), 0);
  ASSERT_EQ(one.to_send(), 0);
  EXPECT_EQ(one.state(), IBV_QPS_RTS);
}

TEST_F(RdmaVerbs, AnEventComesForTheNextCompletionOnly) {
  Two two;
  ASSERT_EQ(::fcntl(two.near.channel()->fd, F_SETFL, O_NONBLOCK), 0);
  ibv_cq* queue = nullptr;
  void* user = nullptr;
  ASSERT_EQ(two.write(1, 100), 0);
  EXPECT_EQ(two.near.wait().wr_id, 1U);
  EXPECT_NE(two.near.verbs().get_cq_event(two.near.channel(), &queue, &user), 0);  // it was not asked for
  ASSERT_EQ(ibv_req_notify_cq(two.near.queue(), 0), 0);
  ASSERT_EQ(two.write(2, 100), 0);
  ASSERT_EQ(two.write(3, 100), 0);
  pollfd readable{two.near.channel()->fd, POLLIN, 0};
  ASSERT_EQ(::poll(&readable, 1, 30'000), 1);
  ASSERT_EQ(two.near.verbs().get_cq_event(two.near.channel(), &queue, &user), 0);
  EXPECT_EQ(queue, two.near.queue());
  EXPECT_EQ(user, &two.near);
  two.near.verbs().ack_cq_events(queue, 1);
  two.near.wait();
  two.near.wait();
  EXPECT_NE(two.near.verbs().get_cq_event(two.near.channel(), &queue, &user), 0);
  EXPECT_EQ(errno, EAGAIN);
}

TEST_F(RdmaVerbs, AnOverrunCompletionQueueTellsItsContext) {
  EndSettings settings;
  settings.entries = 1;
  settings.send_depth = 8;
  Two two(4096, settings);
  const int capacity = two.near.queue()->cqe;  // a card may have rounded it up
  for (int at = 0; at <= capacity + 1 && at < 8; ++at) (void)two.write(at, 1);
  if (capacity > 6) GTEST_SKIP() << "this card's smallest completion queue holds " << capacity;
  ASSERT_EQ(::fcntl(two.near.context()->async_fd, F_SETFL, O_NONBLOCK), 0);
  pollfd readable{two.near.context()->async_fd, POLLIN, 0};
  ASSERT_EQ(::poll(&readable, 1, 30'000), 1);
  ibv_async_event event{};
  ASSERT_EQ(two.near.verbs().get_async_event(two.near.context(), &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_CQ_ERR);
  EXPECT_EQ(event.element.cq, two.near.queue());
  two.near.verbs().ack_async_event(&event);
  while (two.near.verbs().get_async_event(two.near.context(), &event) == 0) two.near.verbs().ack_async_event(&event);
}

TEST_F(RdmaVerbs, MemoryThatCannotBePinnedIsRefused) {
  End end;
  void* const pages = ::mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  ::munmap(static_cast<char*>(pages) + 4096, 4096);
  errno = 0;
  EXPECT_EQ(register_memory(end.verbs(), end.domain(), pages, 8192, End::all_rights), nullptr);
  EXPECT_NE(errno, 0);
  EXPECT_EQ(register_memory(end.verbs(), end.domain(), pages, 4096, IBV_ACCESS_REMOTE_WRITE), nullptr)
      << "a peer may write only what the card may write";
  ibv_mr* const relaxed =
      register_memory(end.verbs(), end.domain(), pages, 4096, End::all_rights | IBV_ACCESS_RELAXED_ORDERING);
  ASSERT_NE(relaxed, nullptr);
  EXPECT_EQ(end.verbs().dereg_mr(relaxed), 0);
  ::munmap(pages, 4096);
}

/// A child process with an end of its own. It serves memory until it is told to end, or killed.
class Child {
 public:
  struct Hello {
    EndAddress address;
    std::uint64_t data;
    std::uint32_t key;
  };

  explicit Child(std::size_t bytes) {
    int sockets[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) throw std::runtime_error("socketpair");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(sockets[0]);
      run(sockets[1], bytes);
      ::_exit(0);
    }
    ::close(sockets[1]);
    fd_ = sockets[0];
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    ::close(fd_);
    ::waitpid(pid_, nullptr, 0);
  }

  Hello connect(End& end) {
    const auto mine = end.address();
    Hello hello{};
    if (::write(fd_, &mine, sizeof mine) != sizeof mine || ::read(fd_, &hello, sizeof hello) != sizeof hello) {
      throw std::runtime_error("the child has ended");
    }
    end.connect(hello.address);
    return hello;
  }
  void kill() const { ::kill(pid_, SIGKILL); }

 private:
  static void run(int fd, std::size_t bytes) {
    EndAddress peer;
    if (::read(fd, &peer, sizeof peer) != sizeof peer) return;
    End end;
    Registered memory(end.verbs(), end.domain(), bytes, End::all_rights);
    memory.fill(2);
    end.connect(peer);
    const Hello hello{end.address(), memory.address(), memory.rkey()};
    if (::write(fd, &hello, sizeof hello) != sizeof hello) return;
    char end_of_file = 0;
    (void)!::read(fd, &end_of_file, 1);
  }

  pid_t pid_ = -1;
  int fd_ = -1;
};

class RdmaVerbsOfTwoProcesses : public testing::Test {};

TEST_F(RdmaVerbsOfTwoProcesses, OneReadsAndWritesTheOther) {
  Child child(1 << 20);  // before this process has threads
  if (std::holds_alternative<Refusal>(usable_ports(Options()))) {
    GTEST_SKIP() << std::get<Refusal>(usable_ports(Options())).reason;
  }
  End end;
  Registered memory(end.verbs(), end.domain(), 1 << 20, End::all_rights);
  Registered expected(end.verbs(), end.domain(), 1 << 20, End::all_rights);
  expected.fill(2);
  const auto hello = child.connect(end);
  ASSERT_EQ(end.post(IBV_WR_RDMA_READ, 1, memory.piece(0, 1 << 20), hello.data, hello.key), 0);
  ASSERT_EQ(end.wait().status, IBV_WC_SUCCESS);
  EXPECT_EQ(memory.bytes(), expected.bytes());
  expected.fill(9);
  ASSERT_EQ(end.post(IBV_WR_RDMA_WRITE, 2, expected.piece(0, 1 << 20), hello.data, hello.key), 0);
  ASSERT_EQ(end.post(IBV_WR_RDMA_READ, 3, memory.piece(0, 1 << 20), hello.data, hello.key), 0);
  ASSERT_EQ(end.wait().status, IBV_WC_SUCCESS);
  ASSERT_EQ(end.wait().status, IBV_WC_SUCCESS);
  EXPECT_EQ(memory.bytes(), expected.bytes());
}

TEST_F(RdmaVerbsOfTwoProcesses, AKilledPeerUsesUpTheRetries) {
  Child child(1 << 20);
  if (std::holds_alternative<Refusal>(usable_ports(Options()))) {
    GTEST_SKIP() << std::get<Refusal>(usable_ports(Options())).reason;
  }
  End end;
  Registered memory(end.verbs(), end.domain(), 1 << 20, End::all_rights);
  const auto hello = child.connect(end);
  child.kill();
  auto status = IBV_WC_SUCCESS;
  for (int at = 0; at < 1000 && status == IBV_WC_SUCCESS; ++at) {
    ASSERT_EQ(end.post(IBV_WR_RDMA_READ, 1, memory.piece(0, 1 << 20), hello.data, hello.key), 0);
    status = end.wait().status;
  }
  EXPECT_EQ(status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(end.state(), IBV_QPS_ERR);
}

}  // namespace
}  // namespace tensorferry::rdma
