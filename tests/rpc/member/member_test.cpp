// Members of one process that join and leave together.
#include "rpc/member/member.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "agent/rendezvous/directory.h"
#include "agent/rendezvous/memory_store.h"
#include "agent/rendezvous/tcp_store.h"
#include "base/log.h"
#include "rpc/member/outgoing_call.h"
#include "tests/agent/counting_store.h"
#include "tests/agent/patience.h"
#include "tests/agent/sockets.h"

namespace tensorferry {
namespace {

using testing::eventually;
using ::testing::HasSubstr;
using testing::sever_connections;
using testing::stop_listening;

/// A runtime's lock that counts the threads that have released it, and whose signal handler ends every wait.
class InterruptingLock final : public RuntimeLock {
 public:
  void* release() override {
    ++released;
    return this;
  }
  void acquire(void* state) override {
    EXPECT_EQ(state, this);
    --released;
  }
  bool interrupted(void* state) override {
    EXPECT_EQ(state, this);
    EXPECT_EQ(released, 1);
    return true;
  }
  int released = 0;
};

class Members : public ::testing::Test {
 protected:
  std::shared_ptr<Member> make(int rank, int world_size, RuntimeLock* lock = nullptr, const std::string& name = "") {
    RawAgentOptions options;
    options.name = name.empty() ? "w" + std::to_string(rank) : name;
    options.rank = rank;
    options.store = store_;
    options.prefix = prefix_;
    auto made = Member::create(std::move(options), world_size, lock);
    EXPECT_TRUE(made.ok()) << made.status().text();
    auto member = *std::move(made);
    EXPECT_TRUE(member->announce().ok());
    return member;
  }
  std::pair<std::shared_ptr<Member>, std::shared_ptr<Member>> make_pair() {
    auto one = make(0, 2), two = make(1, 2);
    EXPECT_TRUE(one->wait_for_world(Milliseconds(10000)).ok());
    EXPECT_TRUE(two->wait_for_world(Milliseconds(10000)).ok());
    return {one, two};
  }

  std::shared_ptr<Store> store_ = std::make_shared<MemoryStore>();
  std::string prefix_ = "tensorferry";
};

TEST_F(Members, FinishTogetherWhenAllCallsHaveEnded) {
  const auto [one, two] = make_pair();
  std::atomic<bool> served = false;
  two->agent().serve("slow", [&](const Request&, Reply reply) {
    std::this_thread::sleep_for(Milliseconds(200));
    served = true;
    reply.send({});
  });
  auto call = one->agent().call("w1", "slow", {});
  std::thread other([&member = *two] { EXPECT_TRUE(member.finish({}).ok()); });
  EXPECT_TRUE(one->finish({}).ok());
  EXPECT_TRUE(served);
  EXPECT_TRUE(call.done());
  other.join();
}

TEST_F(Members, FinishWaitsForUnreadReplies) {
  const auto member = make(0, 0);
  member->unread = 1;
  EXPECT_EQ(member->finish(Milliseconds(20)).code(), Code::deadline_exceeded);
  member->unread = 0;
  EXPECT_TRUE(member->finish(Milliseconds(1000)).ok());
}

TEST_F(Members, FinishNamesTheMembersThatHaveNotCome) {
  const auto [one, two] = make_pair();
  const auto status = one->finish(Milliseconds(50));
  EXPECT_EQ(status.code(), Code::deadline_exceeded);
  EXPECT_THAT(std::string(status.what()), HasSubstr("w1"));
}

TEST_F(Members, FinishNamesAMemberThatLeftBefore) {
  const auto [one, two] = make_pair();
  two->leave();
  const auto status = one->finish({});
  EXPECT_EQ(status.code(), Code::connection_lost);
  EXPECT_THAT(std::string(status.what()), HasSubstr("\"w1\" was lost before it reached the shutdown (it has left)"));
}

TEST_F(Members, FinishNamesAMemberOfThisHostThatDiedBeforeItHadALink) {
  const auto [one, two] = make_pair();
  stop_listening(Directory(store_, prefix_, {}).find("w1", {})->tcp_addresses.front());
  const auto status = one->finish(Milliseconds(60000));
  EXPECT_EQ(status.code(), Code::connection_lost);
  EXPECT_THAT(std::string(status.what()),
              HasSubstr("\"w1\" was lost before it reached the shutdown (its process has ended)"));
}

TEST_F(Members, ASignalEndsLongWaits) {
  InterruptingLock lock;
  const auto member = make(0, 2, &lock);
  EXPECT_EQ(member->wait_for_world({}).code(), Code::cancelled);
  member->unread = 1;
  EXPECT_EQ(member->finish({}).code(), Code::cancelled);
  EXPECT_EQ(lock.released, 0);
  member->leave();
}

TEST_F(Members, AWorldThatDoesNotComeNamesTheMissingRanks) {
  const auto status = make(0, 2)->wait_for_world(Milliseconds(50));
  EXPECT_EQ(status.code(), Code::deadline_exceeded);
  EXPECT_THAT(std::string(status.what()), HasSubstr("rank 1"));
}

TEST_F(Members, IdentitiesAreTheIncarnationsThatACallReaches) {
  const auto [one, two] = make_pair();
  const auto own = one->id_of("w0"), other = one->id_of("w1");
  ASSERT_TRUE(own.ok() && other.ok());
  EXPECT_EQ(own->incarnation, one->self().incarnation);
  EXPECT_EQ(other->incarnation, two->self().incarnation);
  two->leave();
  EXPECT_EQ(one->id_of("w1").status().code(), Code::not_found);
}

TEST_F(Members, ACallThatIsNeverSentTakesItsReferencesBack) {
  const auto [one, two] = make_pair();
  const auto object = one->references().own({std::make_shared<int>(1), false});
  {
    OutgoingCall call;
    call.begin(*one);
    auto transfer = one->references().pass_to(*one->id_of("w1"));
    ASSERT_TRUE(transfer.add(*object).ok());
    call.carry(std::move(transfer));
    EXPECT_EQ(one->references().counts().forks, 1U);
  }
  EXPECT_EQ(one->references().counts().forks, 0U);
}

TEST_F(Members, ReferencesOutliveLostConnections) {
  const auto [one, two] = make_pair();
  for (const auto& member : {one, two}) {
    member->agent().serve("echo", [](Request request, Reply reply) {
      reply.send({std::move(request.arguments.payload), std::move(request.arguments.buffers), {}, {}});
    });
  }
  const auto reach = [&](const Member& from, const char* to) {
    auto call = from.agent().call(to, "echo", {}, {});
    return call.wait() && call.take().ok();
  };
  ASSERT_TRUE(reach(*one, "w1") && reach(*two, "w0"));
  const auto count = [](const Member& member) { return member.references().counts(); };
  const auto object = one->references().own({std::make_shared<int>(7), false});
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE(round);
    auto transfer = one->references().pass_to(*one->id_of("w1"));
    const auto record = transfer.add(*object);
    ASSERT_TRUE(record.ok());
    transfer.sent();
    auto held = two->references().receive(*record, {one->self().name, one->self().incarnation});
    ASSERT_TRUE(held.ok()) << held.status().text();
    if (round % 2 == 0) sever_connections();  // the acceptance of the fork goes over the next connection
    transfer.ended({});
    EXPECT_TRUE(eventually([&] { return one->references().settled() && two->references().settled(); }));
    EXPECT_EQ(count(*one).forks, 1U);
    if (round % 2 == 1) sever_connections();  // so does the end of the hold
    EXPECT_TRUE((*held)->status().ok());
    *held = nullptr;
    EXPECT_TRUE(eventually([&] { return count(*one).forks == 0; }));
  }
  EXPECT_EQ(one->peers_lost() + two->peers_lost(), 0U);
  EXPECT_EQ(count(*one).objects, 1U);
}

TEST_F(Members, AreAllToldOfTwoRanksWithOneName) {
  for (const int refused : {0, 2}) {  // the rank that comes second; rank 0 may serve the store
    store_ = std::make_shared<MemoryStore>();
    const int holder = 2 - refused;
    auto first = make(holder, 3, nullptr, "one"), bystander = make(1, 3, nullptr, "two");
    RawAgentOptions options;
    options.name = "one";
    options.rank = refused;
    options.store = store_;
    const auto second = *Member::create(std::move(options), 3);
    std::vector<std::thread> threads;
    for (const auto& member : {first, bystander}) {
      threads.emplace_back([member, refused] {
        const auto status = member->wait_for_world(Milliseconds(30000));
        EXPECT_EQ(status.code(), Code::invalid_argument) << status.text();
        EXPECT_THAT(std::string(status.what()),
                    HasSubstr("rank " + std::to_string(refused) +
                              " could not join the world: the name \"one\" is taken by the agent \"one\" (rank " +
                              std::to_string(2 - refused)));
        member->leave();
      });
    }
    const auto announced = second->announce();
    EXPECT_EQ(announced.code(), Code::invalid_argument);
    EXPECT_THAT(std::string(announced.what()), HasSubstr("the name \"one\" is taken"));
    second->leave();
    for (auto& thread : threads) thread.join();

    // The conflict ends with the agents that had it.
    auto again = make(0, 1, nullptr, "one");
    EXPECT_TRUE(again->wait_for_world(Milliseconds(10000)).ok());
  }
}

/// Keeps what this process writes to stderr while the object lives. Unlike GoogleTest's capture, it can be read
/// meanwhile without a moment in which a line is lost.
class Stderr {
 public:
  Stderr() : kept_(::memfd_create("stderr", MFD_CLOEXEC)), before_(::fcntl(2, F_DUPFD_CLOEXEC, 3)) {
    ::dup2(kept_.get(), 2);
  }
  ~Stderr() { ::dup2(before_.get(), 2); }
  Stderr(const Stderr&) = delete;
  Stderr& operator=(const Stderr&) = delete;
  [[nodiscard]] std::string text() const {
    std::string all(1 << 16, 0);
    const auto bytes = ::pread(kept_.get(), all.data(), all.size(), 0);
    all.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
    return all;
  }

 private:
  const FileDescriptor kept_, before_;
};

TEST_F(Members, AreToldOfASecondProcessWithTheirRankBeforeAndAfterTheWorldIsComplete) {
  const auto first = make(0, 2);
  const auto second_of_rank_0 = [&] {
    log_rate::forget();
    const Stderr said;
    RawAgentOptions options;
    options.name = "other";
    options.rank = 0;
    options.store = store_;
    const auto second = *Member::create(std::move(options), 2);
    const auto announced = second->announce();
    EXPECT_THAT(std::string(announced.what()), HasSubstr("rank 0 is taken by the agent \"w0\" (rank 0, pid "));
    const auto refused = "was refused because it has the rank of this agent, \"w0\" (rank 0, pid ";
    EXPECT_TRUE(eventually([&] { return said.text().find(refused) != std::string::npos; })) << said.text();
    EXPECT_THAT(said.text(), HasSubstr("\"other\" (rank 0, pid " + std::to_string(::getpid())));
    second->leave();
  };
  second_of_rank_0();
  const auto other = make(1, 2);
  EXPECT_TRUE(first->wait_for_world(Milliseconds(10000)).ok());
  second_of_rank_0();
}

// Beside the operations of each agent there are those of waiting: eight each half second.
TEST_F(Members, TakeAFixedNumberOfStoreOperationsEachToStartAndToFinish) {
  constexpr int most = 64;  // about twice what an agent takes on an idle machine
  for (const int size : {4, 16, 64}) {
    SCOPED_TRACE(size);
    const auto counting = std::make_shared<testing::CountingStore>(std::make_shared<MemoryStore>());
    store_ = counting;
    std::vector<std::shared_ptr<Member>> members(static_cast<std::size_t>(size));
    const auto together = [&](const std::function<void(int)>& act) {
      const auto from = Clock().now();
      counting->operations = 0;
      std::vector<std::thread> threads;
      for (int rank = 0; rank < size; ++rank) threads.emplace_back([&, rank] { act(rank); });
      for (auto& thread : threads) thread.join();
      const auto halves = static_cast<int>((Clock().now() - from) / Milliseconds(500));
      EXPECT_LT(counting->operations, size * (most + 8 * halves));
    };
    together([&](int rank) {
      auto& member = members[static_cast<std::size_t>(rank)] = make(rank, size);
      const auto began = member->wait_for_world(Milliseconds(60000));
      EXPECT_TRUE(began.ok()) << began.text();
      EXPECT_EQ(member->world().size(), static_cast<std::size_t>(size));
    });
    together([&](int rank) {
      auto& member = members[static_cast<std::size_t>(rank)];
      const auto finished = member->finish(Milliseconds(60000));
      EXPECT_TRUE(finished.ok()) << finished.text();
      member->leave();
    });
  }
}

TEST_F(Members, LeaveNoKeysBehindThatGrowInNumber) {
  const auto memory = std::make_shared<MemoryStore>();
  store_ = memory;
  std::size_t keys = 0;
  for (int round = 0; round < 50; ++round) {
    SCOPED_TRACE(round);
    prefix_ = "tensorferry/2/" + std::to_string(round / 2);  // half of the worlds meet where one was before
    const auto [one, two] = make_pair();
    ASSERT_EQ(one->find("w1")->incarnation, two->self().incarnation);
    if (round % 3 != 0) {
      std::thread other([&member = *two] { EXPECT_TRUE(member.finish({}).ok()); });
      EXPECT_TRUE(one->finish({}).ok());
      other.join();
    }
    one->leave();
    two->leave();
    prefix_ = "tensorferry";
    const auto guest = make(7, 0);
    guest->leave();
    if (round == 0) keys = memory->size();
    ASSERT_EQ(memory->size(), keys);
  }
  // Two slots with a counter and a short record each.
  EXPECT_EQ(keys, 4U);
}

TEST_F(Members, OutliveTheirRendezvousHost) {
  auto server = *TcpStoreServer::listen("127.0.0.1", 0, "");
  const auto address = "127.0.0.1:" + std::to_string(server->port());
  store_ = *connect_tcp_store("127.0.0.1", server->port(), "", Milliseconds(10000));
  const auto [one, two] = make_pair();
  two->agent().serve("answer", [](const Request&, Reply reply) { reply.send({}); });
  auto call = one->agent().call("w1", "answer", {});
  ASSERT_TRUE(call.wait());
  server.reset();

  // An agent to which a link is up is known without the store.
  const auto by_name = one->find("w1"), by_rank = one->find(1);
  ASSERT_TRUE(by_name.ok()) << by_name.status().text();
  ASSERT_TRUE(by_rank.ok()) << by_rank.status().text();
  EXPECT_EQ(by_name->rank, 1);
  EXPECT_EQ(by_rank->name, "w1");
  EXPECT_EQ(by_rank->incarnation, two->self().incarnation);

  const auto gone = "the rendezvous host at " + address + " is gone (";
  const auto lookup = one->find("w2").status();
  EXPECT_EQ(lookup.code(), Code::connection_lost);
  EXPECT_THAT(std::string(lookup.what()), HasSubstr(gone));
  const auto finished = one->finish(Milliseconds(10000));
  EXPECT_EQ(finished.code(), Code::connection_lost);
  EXPECT_THAT(std::string(finished.what()), HasSubstr("shutdown: " + gone));
  EXPECT_THAT(std::string(finished.what()), HasSubstr("; \"w0\" has left"));
}

}  // namespace
}  // namespace tensorferry
