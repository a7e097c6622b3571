// Members of one process that join and leave together.
#include "rpc/member/member.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "agent/rendezvous/memory_store.h"
#include "rpc/member/outgoing_call.h"
#include "tests/agent/patience.h"
#include "tests/agent/sockets.h"

namespace tensorferry {
namespace {

using testing::eventually;
using ::testing::HasSubstr;
using testing::sever_connections;

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
  std::shared_ptr<Member> make(int rank, int world_size, RuntimeLock* lock = nullptr) {
    RawAgentOptions options;
    options.name = "w" + std::to_string(rank);
    options.rank = rank;
    options.store = store_;
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

 private:
  std::shared_ptr<Store> store_ = std::make_shared<MemoryStore>();
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

}  // namespace
}  // namespace tensorferry
