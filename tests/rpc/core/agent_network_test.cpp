// Remote objects over real agents: create, pass on, fetch, release, leave.
#include "rpc/core/agent_network.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <mutex>

#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"
#include "rpc/core/envelope.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/agent/sockets.h"

namespace tensorferry {
namespace {

/// An agent whose functions keep references, as a small version of the Python layer above.
class Member {
 public:
  Member(const std::shared_ptr<Store>& store, const std::string& name) : agent_(testing::join(store, name)) {
    network_ = std::make_shared<AgentNetwork>(agent_);
    references = References::make(id(), network_, {.retry = Milliseconds(20), .ask_after = Milliseconds(200)});
    serve_references(*agent_, references);
    agent_->on_peer_lost([weak = std::weak_ptr(references)](const PeerInfo& peer, const Status& why) {
      if (const auto here = weak.lock()) here->peer_lost({peer.name, peer.incarnation}, why);
    });
    agent_->serve("make", [this](const Request& request, Reply reply) { make(request, std::move(reply)); });
    agent_->serve("keep", [this](const Request& request, Reply reply) { keep(request, std::move(reply)); });
  }
  ~Member() { leave(); }

  void leave() {
    {
      const std::lock_guard lock(mutex_);
      kept_.clear();
    }
    references->close();
    agent_->leave();
  }
  [[nodiscard]] AgentId id() const { return {agent_->self().name, agent_->self().incarnation}; }

  /// Creates a number that lives at `owner`, as remote() does.
  std::shared_ptr<Reference> create(const Member& owner, std::int64_t number) {
    auto reference = references->begin_creation(owner.id());
    Encoder out;
    begin_request(out, 1, reference->ids());
    out.integer(number);
    begin_keywords(out, 0);
    agent_->call(owner.id().name, "make", out.take())
        .on_done([here = references, reference](const Result<Received>& reply) {
          here->end_creation(*reference, reply.ok() ? Status() : reply.status());
        });
    return reference;
  }
  /// Makes `to` keep a reference. Returns the call's status.
  Status pass(const Member& to, const Reference& reference) {
    auto transfer = std::make_shared<ReferenceTransfer>(references->pass_to(to.id()));
    Encoder out;
    begin_request(out, 1);
    const auto record = transfer->add(reference);
    if (!record.ok()) return record.status();
    out.reference(*record);
    begin_keywords(out, 0);
    transfer->sent();
    auto call = agent_->call(to.id().name, "keep", out.take());
    call.wait();
    const auto reply = call.take();
    transfer->ended(reply.status());
    return reply.status();
  }
  std::vector<std::shared_ptr<Reference>> kept() {
    const std::lock_guard lock(mutex_);
    return kept_;
  }
  void forget() {
    std::vector<std::shared_ptr<Reference>> dropped;
    const std::lock_guard lock(mutex_);
    dropped.swap(kept_);
  }

  std::shared_ptr<References> references;

 private:
  void make(const Request& request, Reply reply) {
    Decoder in(request.arguments.payload, request.arguments.buffers);
    const auto head = read_request(in);
    if (in.next() != Tag::integer || !head.creation) return reply.fail({Code::invalid_argument, "make(number)"});
    const auto admitted = references->create({request.peer.name, request.peer.incarnation}, *head.creation);
    if (!admitted.ok()) return reply.fail(admitted);
    references->fulfil(head.creation->object, Outcome{std::make_shared<std::int64_t>(in.integer()), false});
    reply.send({});
  }
  void keep(const Request& request, Reply reply) {
    Decoder in(request.arguments.payload, request.arguments.buffers);
    read_request(in);
    if (in.next() != Tag::reference) return reply.fail({Code::invalid_argument, "keep(reference)"});
    auto received = references->receive(in.reference(), {request.peer.name, request.peer.incarnation});
    if (!received.ok()) return reply.fail(received.status());
    {
      const std::lock_guard lock(mutex_);
      kept_.push_back(*received);
    }
    reply.send({});
  }

  std::shared_ptr<RawAgent> agent_;
  std::shared_ptr<AgentNetwork> network_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Reference>> kept_;
};

class AgentNetworkTest : public ::testing::Test {
 protected:
  std::shared_ptr<Store> store_ = std::make_shared<MemoryStore>();
  Member owner_{store_, "owner"}, user_{store_, "user"}, third_{store_, "third"};
};

TEST_F(AgentNetworkTest, AnObjectLivesUntilItsLastHolderReleasesIt) {
  auto mine = user_.create(owner_, 42);
  ASSERT_TRUE(user_.pass(third_, *mine).ok());  // while the owner creates it
  mine.reset();
  ASSERT_EQ(third_.kept().size(), 1U);
  auto theirs = third_.kept()[0];
  third_.forget();
  EXPECT_TRUE(testing::eventually([&] {
    return theirs->confirmed() && user_.references->settled() && user_.references->counts() == References::Counts();
  }));

  std::promise<std::int64_t> value;
  owner_.references->fetch(theirs->object(), std::nullopt, [&](const Result<Outcome>& outcome) {
    value.set_value(outcome.ok() ? *std::static_pointer_cast<std::int64_t>(outcome->value) : -1);
  });
  EXPECT_EQ(value.get_future().get(), 42);
  EXPECT_EQ(owner_.references->counts().objects, 1U);
  theirs.reset();
  EXPECT_TRUE(testing::eventually([&] { return owner_.references->counts() == References::Counts(); }));
}

TEST_F(AgentNetworkTest, ThousandsOfReferencesLeakNothing) {
  std::vector<std::shared_ptr<Reference>> mine;
  for (int i = 0; i < 2000; ++i) mine.push_back(user_.create(owner_, i));
  EXPECT_TRUE(testing::eventually([&] { return mine.back()->confirmed() && user_.references->settled(); }));
  EXPECT_EQ(owner_.references->counts().objects, 2000U);
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(user_.pass(third_, *mine[static_cast<std::size_t>(i)]).ok());
  mine.clear();
  EXPECT_TRUE(testing::eventually([&] { return owner_.references->counts().objects == 100; }));
  third_.forget();
  EXPECT_TRUE(testing::eventually([&] { return owner_.references->counts() == References::Counts(); }));
}

TEST(AgentNetworkOverLostConnections, TakesNoPeerForDeadWhoseSessionGoesOn) {
  const auto store = std::make_shared<MemoryStore>();
  const auto user = testing::join(store, "user"), owner = testing::join(store, "owner");
  std::mutex mutex;
  std::vector<Reply> held;
  std::atomic<int> messages{0};
  owner->serve(std::string(reference_function), [&](const Request&, Reply reply) {  // each is lost with its connection
    const std::lock_guard lock(mutex);
    held.push_back(std::move(reply));
    ++messages;
  });
  References::Options options;
  options.retry = options.most_retry = Milliseconds(10);
  options.give_up = Milliseconds(50);
  const AgentId owner_id{owner->self().name, owner->self().incarnation};
  const auto references =
      References::make({user->self().name, user->self().incarnation}, std::make_shared<AgentNetwork>(user), options);
  const auto kept = references->begin_creation(owner_id);
  references->end_creation(*kept, {});
  references->end_creation(*references->begin_creation(owner_id), {});  // and drops it, which the owner is told
  for (int cut = 1; cut <= 12; ++cut) {
    ASSERT_TRUE(testing::eventually([&] { return messages >= cut; }))
        << "the message is not sent again, cut " << cut << "\n"
        << user->link_state("owner") << "\n"
        << owner->link_state("user") << "\n"
        << kept->status().text();
    testing::sever_connections();
  }
  EXPECT_TRUE(kept->status().ok()) << kept->status().text();
  references->close();
  user->leave();
  owner->leave();
}

TEST_F(AgentNetworkTest, HoldsOfAnAgentAreReclaimedWhenItLeaves) {
  auto mine = owner_.references->own({std::make_shared<int>(1), false});
  ASSERT_TRUE(owner_.pass(third_, *mine).ok());
  mine.reset();
  EXPECT_EQ(owner_.references->counts().objects, 1U);
  third_.leave();
  EXPECT_TRUE(testing::eventually([&] { return owner_.references->counts() == References::Counts(); }));
}

TEST_F(AgentNetworkTest, ReferencesOfADepartedOwnerNameIt) {
  auto mine = user_.create(owner_, 1);
  EXPECT_TRUE(testing::eventually([&] { return mine->confirmed(); }));
  owner_.leave();
  EXPECT_TRUE(testing::eventually([&] { return !mine->status().ok(); }));
  EXPECT_EQ(mine->status().code(), Code::connection_lost);
  EXPECT_NE(mine->status().what().find("owner"), std::string_view::npos);
}

}  // namespace
}  // namespace tensorferry
