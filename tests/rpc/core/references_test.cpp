#include "rpc/core/references.h"

#include <gtest/gtest.h>

#include <set>

#include "rpc/core/reference_proof.h"
#include "tests/rpc/core/reference_world.h"

namespace tensorferry {
namespace {

using testing::Life;
using testing::World;

class ReferencesTest : public ::testing::Test {
 protected:
  using Handle = std::shared_ptr<Reference>;

  Outcome outcome(bool raised = false) {
    auto value = std::make_shared<int>(7);
    value_ = value;
    return {value, raised};
  }
  [[nodiscard]] bool freed() const { return value_.expired(); }

  /// Sends a message with one reference, which arrives at once. Returns the receiver's handle.
  Handle send(Life& from, Life& to, const Handle& reference) {
    auto transfer = from.references->pass_to(to.id);
    const auto record = transfer.add(*reference);
    EXPECT_TRUE(record.ok()) << record.status().text();
    transfer.sent();
    auto received = to.references->receive(*record, from.id);
    EXPECT_TRUE(received.ok()) << received.status().text();
    transfer.ended({});
    return received.ok() ? *received : nullptr;
  }
  /// Sends a message with a new object's only reference; the owner keeps none. Returns the message's ReferenceTransfer.
  ReferenceTransfer pass_only_hold(Life& owner, Life& to) {
    const auto mine = owner.references->own(outcome());
    auto transfer = owner.references->pass_to(to.id);
    EXPECT_TRUE(transfer.add(*mine).ok());
    transfer.sent();
    return transfer;
  }
  /// Creates an object without any failure.
  Handle create(Life& creator, Life& owner) {
    auto handle = creator.references->begin_creation(owner.id, "torch.nn.Linear");
    EXPECT_TRUE(owner.references->create(creator.id, handle->ids()).ok());
    owner.references->fulfil(handle->object(), outcome());
    creator.references->end_creation(*handle, {});
    return handle;
  }
  std::shared_ptr<Result<Outcome>> fetch(Life& owner, const RRefId& object,
                                         std::optional<Clock::time_point> deadline = std::nullopt,
                                         const ForkId& by = {}) {
    auto out = std::make_shared<Result<Outcome>>(Status(Code::internal, "pending"));
    owner.references->fetch(
        object, deadline, [out](Result<Outcome> result) { *out = std::move(result); }, by);
    return out;
  }
  static bool pending(const std::shared_ptr<Result<Outcome>>& result) {
    return result->status().code() == Code::internal;
  }
  void settle() { world_.clock.run_for(60000); }

  World world_{1, 0};
  std::shared_ptr<Life> owner_ = world_.start("owner"), user_ = world_.start("user"), third_ = world_.start("third");
  std::weak_ptr<void> value_;
};

TEST_F(ReferencesTest, AnObjectLivesAsLongAsItsOwnersHandle) {
  auto handle = owner_->references->own(outcome(), "int");
  EXPECT_TRUE(handle->is_owner());
  EXPECT_TRUE(handle->confirmed());
  EXPECT_EQ(handle->type_hint(), "int");
  EXPECT_EQ(*std::static_pointer_cast<int>((**fetch(*owner_, handle->object())).value), 7);
  EXPECT_EQ(owner_->references->counts().objects, 1U);
  handle.reset();
  EXPECT_TRUE(freed());
  EXPECT_EQ(owner_->references->counts(), References::Counts());
}

TEST_F(ReferencesTest, AnObjectLivesAsLongAsAHandleOfAnotherAgent) {
  auto mine = owner_->references->own(outcome());
  auto theirs = send(*owner_, *user_, mine);
  mine.reset();
  settle();
  EXPECT_FALSE(freed());
  EXPECT_TRUE(theirs->confirmed());
  EXPECT_FALSE(theirs->is_owner());
  EXPECT_EQ(theirs->owner(), owner_->id);
  EXPECT_EQ(user_->references->counts().holds, (std::map<std::string, std::size_t>{{"owner", 1}}));
  EXPECT_EQ(owner_->references->counts().forks, 1U);
  theirs.reset();
  settle();
  EXPECT_TRUE(freed());
}

TEST_F(ReferencesTest, AnObjectCanBeFetchedDuringItsCreation) {
  auto handle = user_->references->begin_creation(owner_->id, "hint");
  const auto early = fetch(*owner_, handle->object());  // overtakes the creation
  EXPECT_TRUE(pending(early));
  ASSERT_TRUE(owner_->references->create(user_->id, handle->ids()).ok());
  EXPECT_TRUE(pending(early));
  EXPECT_FALSE(handle->confirmed());
  owner_->references->fulfil(handle->object(), outcome(true));
  user_->references->end_creation(*handle, {});
  EXPECT_TRUE(handle->confirmed());
  ASSERT_TRUE(early->ok());
  EXPECT_TRUE((*early)->raised);
  const auto late = fetch(*owner_, handle->object());  // the owner keeps the exception
  ASSERT_TRUE(late->ok());
  EXPECT_EQ((*late)->value, (*early)->value);
}

TEST_F(ReferencesTest, AnObjectThatIsNotMadeGivesItsUsersTheErrorAndIsFreed) {
  auto handle = user_->references->begin_creation(owner_->id, "hint");
  const auto early = fetch(*owner_, handle->object());
  ASSERT_TRUE(owner_->references->create(user_->id, handle->ids()).ok());
  owner_->references->fulfil(handle->object(), Status(Code::deadline_exceeded, "its deadline passed"));
  ASSERT_FALSE(pending(early));
  EXPECT_EQ(early->status().code(), Code::deadline_exceeded);
  user_->references->end_creation(*handle, {});
  EXPECT_EQ(fetch(*owner_, handle->object())->status().code(), Code::deadline_exceeded);
  handle.reset();
  settle();
  EXPECT_EQ(owner_->references->counts(), References::Counts());
}

TEST_F(ReferencesTest, ACreatorThatGivesUpEndsItsOwnFetchesAlone) {
  const auto handle = user_->references->begin_creation(owner_->id, "hint");
  const auto ids = handle->ids();
  ASSERT_TRUE(owner_->references->create(user_->id, ids).ok());
  const auto passed = send(*user_, *third_, handle);
  settle();
  const auto mine = fetch(*owner_, ids.object, std::nullopt, ids.fork);
  const auto theirs = fetch(*owner_, ids.object, std::nullopt, passed->ids().fork);
  const auto local = fetch(*owner_, ids.object);
  EXPECT_TRUE(pending(mine));
  user_->references->end_creation(*handle, {Code::deadline_exceeded, "no answer in 0.1 s"});
  settle();
  EXPECT_EQ(mine->status().code(), Code::cancelled);
  EXPECT_NE(mine->status().what().find("no answer in 0.1 s"), std::string_view::npos);
  EXPECT_EQ(fetch(*owner_, ids.object, std::nullopt, ids.fork)->status().code(), Code::cancelled)
      << "one that was under way when the creator gave up";
  EXPECT_TRUE(pending(theirs) && pending(local)) << "the function still runs";
  owner_->references->fulfil(ids.object, outcome());
  EXPECT_TRUE(theirs->ok() && local->ok());
}

TEST_F(ReferencesTest, AFetchEndsAtItsDeadline) {
  auto handle = user_->references->begin_creation(owner_->id);
  const auto result = fetch(*owner_, handle->object(), Clock().now() + std::chrono::seconds(10));
  world_.clock.run_for(9000);
  EXPECT_TRUE(pending(result));
  world_.clock.run_for(2000);
  EXPECT_EQ(result->status().code(), Code::deadline_exceeded);
  EXPECT_EQ(fetch(*owner_, {owner_->id.incarnation, 99})->status().code(), Code::not_found);
}

TEST_F(ReferencesTest, ACreatorMayReleaseItsObjectDuringTheCreation) {
  auto handle = user_->references->begin_creation(owner_->id);
  const auto ids = handle->ids();
  ASSERT_TRUE(owner_->references->create(user_->id, ids).ok());
  user_->references->end_creation(*handle, {});
  handle.reset();
  settle();
  EXPECT_EQ(owner_->references->counts().objects, 1U);  // still running
  owner_->references->fulfil(ids.object, outcome());
  EXPECT_TRUE(freed());
  EXPECT_EQ(owner_->references->counts(), References::Counts());
}

TEST_F(ReferencesTest, ARequestToCreateThatComesAgainIsKnownByItsCreatorAndItsNumber) {
  auto handle = user_->references->begin_creation(owner_->id);
  const auto ids = handle->ids();
  EXPECT_FALSE(owner_->references->comes_again(user_->id, ids));
  ASSERT_TRUE(owner_->references->create(user_->id, ids).ok());
  EXPECT_TRUE(owner_->references->comes_again(user_->id, ids));
  EXPECT_FALSE(owner_->references->comes_again(third_->id, ids));
  owner_->references->fulfil(ids.object, outcome());
  EXPECT_TRUE(owner_->references->comes_again(user_->id, ids));
  user_->references->end_creation(*handle, {});
  handle.reset();
  settle();
  EXPECT_FALSE(owner_->references->comes_again(user_->id, ids)) << "the object is gone";
  EXPECT_EQ(owner_->references->create(user_->id, ids).code(), Code::cancelled);
}

TEST_F(ReferencesTest, AReferenceCanBePassedOnDuringTheCreation) {
  auto handle = user_->references->begin_creation(owner_->id, "hint");
  auto passed = send(*user_, *third_, handle);
  EXPECT_EQ(passed->type_hint(), "hint");
  settle();
  EXPECT_TRUE(passed->confirmed());  // the owner awaits the object
  ASSERT_TRUE(owner_->references->create(user_->id, handle->ids()).ok());
  owner_->references->fulfil(handle->object(), outcome());
  user_->references->end_creation(*handle, {});
  handle.reset();
  settle();
  EXPECT_FALSE(freed());
  passed.reset();
  settle();
  EXPECT_TRUE(freed());
}

TEST_F(ReferencesTest, AReferenceInAMessageThatComesAgainIsOneHoldWithAHandleForEach) {
  auto mine = owner_->references->own(outcome());
  auto transfer = owner_->references->pass_to(user_->id);
  const auto record = transfer.add(*mine);
  transfer.sent();
  auto first = user_->references->receive(*record, owner_->id);
  auto second = user_->references->receive(*record, owner_->id);
  ASSERT_TRUE(first.ok() && second.ok()) << second.status().text();
  transfer.ended({});
  mine.reset();
  *first = nullptr;
  settle();
  EXPECT_FALSE(freed()) << "the second one still holds the object";
  EXPECT_EQ(user_->references->counts().holds, (std::map<std::string, std::size_t>{{owner_->id.name, 1}}));
  *second = nullptr;
  settle();
  EXPECT_TRUE(freed());
  const auto third = user_->references->receive(*record, owner_->id);
  EXPECT_EQ(third.status().code(), Code::cancelled) << "the owner knows this hold no more";
}

TEST_F(ReferencesTest, ThePasserMayReleaseAReferenceInTransit) {
  auto handle = create(*user_, *owner_);
  auto transfer = user_->references->pass_to(third_->id);
  const auto record = transfer.add(*handle);
  transfer.sent();
  handle.reset();
  settle();
  EXPECT_FALSE(freed());
  EXPECT_FALSE(user_->references->settled());
  auto received = third_->references->receive(*record, user_->id);
  transfer.ended({});
  settle();
  EXPECT_FALSE(freed());
  EXPECT_EQ(user_->references->counts(), References::Counts());
  EXPECT_TRUE(user_->references->settled());
  *received = nullptr;
  settle();
  EXPECT_TRUE(freed());
}

TEST_F(ReferencesTest, AnUnsentMessageReturnsItsReferences) {
  auto handle = create(*user_, *owner_);
  {
    auto transfer = user_->references->pass_to(third_->id);
    ASSERT_TRUE(transfer.add(*handle).ok());
    EXPECT_EQ(user_->references->counts().passing, 1U);
  }
  EXPECT_EQ(user_->references->counts().passing, 0U);
  auto mine = owner_->references->own(outcome());
  {
    auto transfer = owner_->references->pass_to(third_->id);
    ASSERT_TRUE(transfer.add(*mine).ok());
    mine.reset();
    EXPECT_FALSE(freed());
  }
  EXPECT_TRUE(freed());
}

TEST_F(ReferencesTest, ARequestThatArrivesAfterItsCallFailedIsRefused) {
  auto mine = owner_->references->own(outcome());
  auto transfer = owner_->references->pass_to(user_->id);
  const auto record = transfer.add(*mine);
  transfer.sent();
  transfer.ended({Code::deadline_exceeded, "no answer"});
  mine.reset();
  settle();
  EXPECT_TRUE(freed());
  EXPECT_EQ(user_->references->receive(*record, owner_->id).status().code(), Code::cancelled);
  EXPECT_EQ(user_->references->counts(), References::Counts());
}

TEST_F(ReferencesTest, AReceiverKeepsTheReferenceOfACallThatFailsLater) {
  auto mine = owner_->references->own(outcome());
  auto transfer = owner_->references->pass_to(user_->id);
  const auto record = transfer.add(*mine);
  transfer.sent();
  auto theirs = user_->references->receive(*record, owner_->id);
  transfer.ended({Code::deadline_exceeded, "no answer"});
  mine.reset();
  settle();
  EXPECT_FALSE(freed());
  EXPECT_TRUE((*theirs)->status().ok());
}

TEST_F(ReferencesTest, AnUnreadReplyKeepsItsReferences) {
  const auto call = user_->references->begin_call();
  auto mine = owner_->references->own(outcome());
  auto transfer = owner_->references->pass_to(user_->id);
  const auto record = transfer.add(*mine);
  transfer.sent();
  transfer.replied(call);
  mine.reset();
  world_.clock.run_for(600000);  // the caller holds the future and does not read it
  EXPECT_FALSE(freed());
  auto theirs = user_->references->receive(*record, owner_->id);
  user_->references->end_call(call);
  ASSERT_TRUE(theirs.ok());
  settle();
  EXPECT_FALSE(freed());
  *theirs = nullptr;
  settle();
  EXPECT_TRUE(freed());
}

TEST_F(ReferencesTest, ADroppedReplyReturnsItsReferences) {
  const auto call = user_->references->begin_call();
  auto mine = owner_->references->own(outcome());
  auto transfer = owner_->references->pass_to(user_->id);
  ASSERT_TRUE(transfer.add(*mine).ok());
  transfer.sent();
  transfer.replied(call);
  mine.reset();
  user_->references->end_call(call);  // timed out: no thread will read the reply
  settle();
  EXPECT_TRUE(freed());
  EXPECT_TRUE(owner_->references->settled());
}

TEST_F(ReferencesTest, AReferenceCanReturnToItsOwner) {
  auto theirs = create(*user_, *owner_);
  auto home = send(*user_, *owner_, theirs);
  EXPECT_TRUE(home->is_owner());
  theirs.reset();
  settle();
  EXPECT_FALSE(freed());
  EXPECT_EQ(owner_->references->counts().forks, 0U);
  home.reset();
  EXPECT_TRUE(freed());
}

TEST_F(ReferencesTest, AnAgentPassesReferencesToItself) {
  auto mine = owner_->references->own(outcome());
  auto again = send(*owner_, *owner_, mine);
  mine.reset();
  EXPECT_FALSE(freed());
  EXPECT_EQ(owner_->references->counts().forks, 0U);
  again.reset();
  EXPECT_TRUE(freed());

  auto theirs = create(*user_, *owner_);
  auto twice = send(*user_, *user_, theirs);
  theirs.reset();
  settle();
  EXPECT_FALSE(freed());
  twice.reset();
  settle();
  EXPECT_TRUE(freed());
}

TEST_F(ReferencesTest, AnAgentCreatesAnObjectAtItself) {
  auto handle = owner_->references->begin_creation(owner_->id);
  const auto early = fetch(*owner_, handle->object());
  ASSERT_TRUE(owner_->references->create(owner_->id, handle->ids()).ok());
  owner_->references->fulfil(handle->object(), outcome());
  owner_->references->end_creation(*handle, {});
  EXPECT_TRUE(early->ok());
  *early = Status();
  handle.reset();
  EXPECT_TRUE(freed());

  auto failed = owner_->references->begin_creation(owner_->id);
  const auto ids = failed->ids();
  const auto waiting = fetch(*owner_, ids.object);
  owner_->references->end_creation(*failed, {Code::deadline_exceeded, "no answer"});
  EXPECT_EQ(waiting->status().code(), Code::deadline_exceeded);
  failed.reset();
  EXPECT_EQ(owner_->references->create(owner_->id, ids).code(), Code::cancelled);
  EXPECT_EQ(owner_->references->counts(), References::Counts());
}

TEST_F(ReferencesTest, AnAbandonedCreationIsNotRunLater) {
  auto handle = user_->references->begin_creation(owner_->id);
  auto passed = send(*user_, *third_, handle);
  settle();
  const auto waiting = fetch(*owner_, handle->object());
  user_->references->end_creation(*handle, {Code::deadline_exceeded, "no answer in 60 s"});
  EXPECT_EQ(handle->status().code(), Code::deadline_exceeded);
  settle();
  EXPECT_EQ(waiting->status().code(), Code::cancelled);
  EXPECT_NE(waiting->status().what().find("no answer in 60 s"), std::string_view::npos);
  EXPECT_EQ(owner_->references->create(user_->id, handle->ids()).code(), Code::cancelled);
  handle.reset();
  passed.reset();
  settle();
  for (const auto& life : world_.lives) EXPECT_EQ(life->references->counts(), References::Counts());
}

TEST_F(ReferencesTest, AnObjectWhoseCreatorTimedOutStaysWithItsHolders) {
  auto handle = user_->references->begin_creation(owner_->id);
  ASSERT_TRUE(owner_->references->create(user_->id, handle->ids()).ok());
  owner_->references->fulfil(handle->object(), outcome());
  auto transfer = user_->references->pass_to(third_->id);
  const auto record = transfer.add(*handle);
  transfer.sent();
  user_->references->end_creation(*handle, {Code::deadline_exceeded, "the answer was lost"});
  handle.reset();
  settle();
  EXPECT_FALSE(freed());
  auto passed = third_->references->receive(*record, user_->id);
  transfer.ended({});
  settle();
  EXPECT_FALSE(freed());
  EXPECT_TRUE((*passed)->confirmed());
  *passed = nullptr;
  settle();
  EXPECT_TRUE(freed());
}

TEST_F(ReferencesTest, UsesOfADeadOwnersObjectsFailWithItsName) {
  auto confirmed = create(*user_, *owner_);
  auto creating = user_->references->begin_creation(owner_->id);
  Status told;
  creating->on_confirmed([&](Status status) { told = std::move(status); });
  world_.kill(owner_);
  world_.clock.run_for(30000);
  for (const auto& handle : {confirmed, creating}) {
    EXPECT_EQ(handle->status().code(), Code::connection_lost);
    EXPECT_NE(handle->status().what().find("owner"), std::string_view::npos);
    EXPECT_EQ(user_->references->pass_to(third_->id).add(*handle).status().code(), Code::connection_lost);
  }
  EXPECT_EQ(told.code(), Code::connection_lost);
  auto later = user_->references->begin_creation(owner_->id);
  EXPECT_EQ(later->status().code(), Code::connection_lost);
}

TEST_F(ReferencesTest, ReferencesOfADeadUserAreReclaimed) {
  auto theirs = create(*user_, *owner_);
  theirs.reset();
  auto theirs_too = create(*user_, *owner_);
  EXPECT_FALSE(freed());
  world_.kill(user_);
  world_.clock.run_for(30000);
  EXPECT_TRUE(freed());
  EXPECT_EQ(owner_->references->counts(), References::Counts());
}

TEST_F(ReferencesTest, AReferenceOutlivesItsPasser) {
  auto theirs = create(*user_, *owner_);
  auto passed = send(*user_, *third_, theirs);
  settle();
  world_.kill(user_);
  settle();
  EXPECT_FALSE(freed());
  EXPECT_TRUE(passed->status().ok());
}

TEST_F(ReferencesTest, ReferencesPassedToADeadAgentAreTakenBack) {
  auto transfer = pass_only_hold(*owner_, *user_);
  world_.kill(user_);
  world_.clock.run_for(30000);
  EXPECT_TRUE(freed());
  transfer.ended({Code::connection_lost, "gone"});
  auto other = owner_->references->own(outcome());
  EXPECT_EQ(owner_->references->pass_to(user_->id).add(*other).status().code(), Code::connection_lost);
}

TEST_F(ReferencesTest, ReferencesPassedToAnAgentThatDiesBeforeItConnectsAreTakenBack) {
  auto transfer = pass_only_hold(*owner_, *user_);
  world_.kill(user_, false);
  transfer.ended({Code::connection_lost, "no process is at its address"});
  world_.clock.run_for(10000);
  EXPECT_FALSE(freed()) << "it may yet be reached";
  world_.clock.run_for(20000);
  EXPECT_TRUE(freed());
}

TEST_F(ReferencesTest, ANewIncarnationOfTheReceiverGetsNothing) {
  auto mine = owner_->references->own(outcome());
  auto transfer = owner_->references->pass_to(user_->id);
  const auto record = transfer.add(*mine);
  transfer.sent();
  world_.kill(user_);
  const auto again = world_.start("user");
  EXPECT_EQ(again->references->receive(*record, owner_->id).status().code(), Code::protocol_error);
}

TEST_F(ReferencesTest, AnObjectWhoseCreatorDiesBeforeItReachesTheOwnerFails) {
  auto handle = user_->references->begin_creation(owner_->id);
  auto passed = send(*user_, *third_, handle);
  handle.reset();
  const auto waiting = fetch(*owner_, passed->object());
  // The owner has had no contact with the creator, so no agent reports the death to it.
  user_->alive = false;
  user_->references->close();
  world_.start("user");
  settle();
  EXPECT_EQ(waiting->status().code(), Code::connection_lost);
  EXPECT_NE(waiting->status().what().find("user"), std::string_view::npos);
  EXPECT_EQ(fetch(*owner_, passed->object())->status().code(), Code::connection_lost);
}

TEST_F(ReferencesTest, AnAgentThatCountsAsDeadGetsAnError) {
  auto theirs = create(*user_, *owner_);
  owner_->references->peer_lost(user_->id, {Code::connection_lost, "silent"});
  EXPECT_TRUE(freed());
  EXPECT_TRUE(theirs->status().ok());  // the user does not know yet
  auto second = create(*user_, *third_);
  auto ignored = user_->references->begin_creation(owner_->id);
  EXPECT_EQ(owner_->references->create(user_->id, ignored->ids()).code(), Code::connection_lost);
  user_->references->end_creation(*ignored, {Code::connection_lost, "refused"});
  settle();  // the user tells the owner that it gives the creation up, and the answer says that it counts as dead
  EXPECT_EQ(theirs->status().code(), Code::connection_lost);
  EXPECT_TRUE(second->status().ok());
}

TEST_F(ReferencesTest, OnlyTheHolderOfAForkCanEndIt) {
  auto theirs = create(*user_, *owner_);
  const auto ids = theirs->ids();
  std::uint64_t number = 0;
  const auto mail = [&](ReferenceOp op) {
    const auto answer = owner_->references->receive_mail(
        third_->id, encode(ReferenceBatch{owner_->id.incarnation, ++number, {std::move(op)}}));
    EXPECT_TRUE(answer.ok());
  };
  using Kind = ReferenceOp::Kind;
  for (const auto kind : {Kind::remove, Kind::abandon, Kind::accept, Kind::withdraw}) {
    mail(ReferenceOp::of(kind, ids.fork, ids.object));
  }
  EXPECT_FALSE(freed());
  EXPECT_TRUE(fetch(*owner_, ids.object)->ok());

  auto mine = owner_->references->own(outcome());
  auto transfer = owner_->references->pass_to(user_->id);
  const auto record = transfer.add(*mine);
  mail(ReferenceOp::of(Kind::accept, record->fork));
  EXPECT_EQ(owner_->references->counts().passing, 1U);
}

TEST_F(ReferencesTest, RecordsOfAnotherPasserOrReceiverAreRefused) {
  auto mine = owner_->references->own(outcome());
  auto transfer = owner_->references->pass_to(user_->id);
  const auto record = transfer.add(*mine);
  EXPECT_EQ(user_->references->receive(*record, third_->id).status().code(), Code::protocol_error);
  EXPECT_EQ(third_->references->receive(*record, owner_->id).status().code(), Code::protocol_error);
  auto theirs = user_->references->receive(*record, owner_->id);
  ASSERT_TRUE(theirs.ok());
}

TEST_F(ReferencesTest, RecordsForgedInTheAgentsOwnNameAreRefused) {
  const auto creation = create(*user_, *owner_);
  // The number of the user's next fork. If it were accepted, two handles would share one hold.
  const ForkId next{user_->id.incarnation, creation->ids().fork.counter + 1};
  const ReferenceRecord made_up{owner_->id, creation->object(), next, user_->id, user_->id.incarnation, ""};
  EXPECT_EQ(user_->references->receive(made_up, user_->id).status().code(), Code::protocol_error);
  const auto again = create(*user_, *owner_);
  EXPECT_EQ(again->ids().fork.counter, next.counter);
  EXPECT_TRUE(user_->references->pass_to(third_->id).add(*again).ok());
}

TEST_F(ReferencesTest, HandlesOfOneAgentAreRefusedByAnother) {
  auto mine = owner_->references->own(outcome());
  EXPECT_EQ(user_->references->pass_to(third_->id).add(*mine).status().code(), Code::invalid_argument);
  EXPECT_EQ(owner_->references->pass_to({"user", 0}).add(*mine).status().code(), Code::invalid_argument);
  EXPECT_EQ(ReferenceTransfer().add(*mine).status().code(), Code::invalid_argument);
}

TEST_F(ReferencesTest, ClosingCompletesEverythingAndFailsItsHandles) {
  auto theirs = create(*user_, *owner_);
  auto creating = user_->references->begin_creation(owner_->id);
  Status told;
  creating->on_confirmed([&](Status status) { told = std::move(status); });
  const auto waiting = fetch(*owner_, creating->object());
  user_->references->close();
  owner_->references->close();
  owner_->references->close();
  EXPECT_TRUE(freed());
  EXPECT_EQ(told.code(), Code::agent_closed);
  EXPECT_EQ(waiting->status().code(), Code::agent_closed);
  EXPECT_EQ(theirs->status().code(), Code::agent_closed);
  EXPECT_FALSE(theirs->confirmed());
  EXPECT_EQ(user_->references->pass_to(third_->id).add(*theirs).status().code(), Code::agent_closed);
  auto late = owner_->references->own(outcome());
  EXPECT_TRUE(freed());
  EXPECT_EQ(late->status().code(), Code::agent_closed);
  EXPECT_EQ(fetch(*owner_, late->object())->status().code(), Code::agent_closed);
}

TEST_F(ReferencesTest, AValueMayCallBackDuringItsDestruction) {
  struct Reentrant {
    std::shared_ptr<References> references;
    ~Reentrant() { references->own({}); }
  };
  auto mine = owner_->references->own({std::shared_ptr<Reentrant>(new Reentrant{owner_->references}), false});
  mine.reset();
  EXPECT_EQ(owner_->references->counts(), References::Counts());
}

TEST(IntervalSet, HoldsInsertedNumbers) {
  IntervalSet set;
  for (const std::uint64_t number : {5, 3, 4, 9, 1, 1, 2}) set.insert(number);
  for (std::uint64_t number = 0; number < 12; ++number) {
    EXPECT_EQ(set.contains(number), (number >= 1 && number <= 5) || number == 9) << number;
  }
  EXPECT_EQ(set.runs(), 2U);
  set.insert(~std::uint64_t{0});
  set.insert(0);
  EXPECT_TRUE(set.contains(~std::uint64_t{0}));
  EXPECT_EQ(set.runs(), 3U);
  for (std::uint64_t number = 0; number < 3 * IntervalSet::most_runs; number += 2) set.insert(number + 100);
  EXPECT_EQ(set.runs(), IntervalSet::most_runs);
}

TEST(ReferenceMail, RoundTrips) {
  using Kind = ReferenceOp::Kind;
  std::vector<ReferenceOp> ops;
  for (const auto kind : {Kind::fork, Kind::remove, Kind::abandon})
    ops.push_back(ReferenceOp::of(kind, {3, 4}, {1, 2}));
  for (const auto kind : {Kind::accept, Kind::withdraw}) ops.push_back(ReferenceOp::of(kind, {3, 4}));
  ops.push_back(ReferenceOp::of(Kind::ping));
  ops[0].parent = {"parent", 5};
  ops[2].text = "why";
  ops[4].call = 300;
  const auto bytes = encode(ReferenceBatch{7, 8, ops});
  const auto batch = decode<ReferenceBatch>(bytes);
  ASSERT_TRUE(batch);
  EXPECT_EQ(batch->receiver, 7U);
  EXPECT_EQ(batch->number, 8U);
  EXPECT_EQ(batch->ops, ops);
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(decode<ReferenceBatch>(ByteView(bytes).first(length)));

  const ReferenceAnswer answer{ReferenceAnswer::Kind::done, {{ReferenceResult::Code::gone, "why"}, {}}};
  const auto answer_bytes = encode(answer);
  const auto back = decode<ReferenceAnswer>(answer_bytes);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->results, answer.results);
  for (std::size_t length = 0; length < answer_bytes.size(); ++length) {
    EXPECT_FALSE(decode<ReferenceAnswer>(ByteView(answer_bytes).first(length)));
  }
}

// ---- who may use an object

/// Sends one operation from the tables of `from` to those of `to`, as a peer that follows no rules. Returns the result.
ReferenceResult::Code send_op(Life& to, const AgentId& from, ReferenceOp op, std::uint64_t number = 1) {
  ReferenceBatch batch{to.id.incarnation, number, {std::move(op)}};
  const auto bytes = to.references->receive_mail(from, encode(batch));
  EXPECT_TRUE(bytes.ok()) << bytes.status().text();
  const auto answer = decode<ReferenceAnswer>(*bytes);
  EXPECT_TRUE(answer && answer->results.size() == 1);
  return answer->results.at(0).code;
}

TEST(ReferenceProof, IsSipHash) {
  const auto hash = [](const std::vector<std::uint64_t>& words) {
    return siphash(0x0706050403020100U, 0x0f0e0d0c0b0a0908U, words);
  };
  // Vectors of the algorithm's authors, for the bytes 0, 1, 2, ...
  EXPECT_EQ(hash({}), 0x726fdb47dd0e0e31U);
  EXPECT_EQ(hash({0x0706050403020100U}), 0x93f5f5799a932462U);
  EXPECT_EQ(hash({0x0706050403020100U, 0x0f0e0d0c0b0a0908U}), 0x3f2acc7f57c29bdbU);
}

TEST(ReferenceProof, NoncesDifferFromAgentToAgentAndFromObjectToObject) {
  class Silence final : public References::Network {
    void send(const AgentId& /*peer*/, Bytes /*message*/, UniqueFunction<void(Result<Bytes>)> /*done*/) override {}
    void after(Milliseconds /*delay*/, UniqueFunction<void()> /*what*/) override {}
  };
  std::set<std::uint64_t> seen;
  for (int i = 0; i < 3; ++i) {  // agents of the same names, incarnations and numbers
    const auto references = References::make({"user", 1}, std::make_shared<Silence>());
    for (int k = 0; k < 3; ++k) {
      const auto mine = references->own({std::make_shared<int>(1), false});
      const auto theirs = references->begin_creation({"owner", 2});
      seen.insert({mine->object().nonce, theirs->object().nonce, theirs->ids().fork.nonce});
    }
  }
  EXPECT_EQ(seen.size(), 27U);
}

TEST_F(ReferencesTest, OnlyHoldersMayUseAnObject) {
  const auto made = create(*user_, *owner_);
  const auto mine = owner_->references->own(outcome());
  const auto given = send(*owner_, *user_, mine);
  for (const auto& reference : {made, given}) {
    const auto object = reference->object();
    const auto fork = reference->ids().fork;
    auto& references = *owner_->references;
    EXPECT_TRUE(references.may_use(user_->id, object, fork).ok());
    EXPECT_TRUE(references.may_use(owner_->id, object, {}).ok());

    const auto refused = references.may_use(third_->id, object, fork);  // another agent's fork
    EXPECT_EQ(refused.code(), Code::permission_denied);
    EXPECT_EQ(refused.what(), "\"third\" holds no reference to the object " + std::to_string(object.incarnation) + ":" +
                                  std::to_string(object.counter) + " of \"owner\"");
    for (auto made_up : {ForkId{}, ForkId{third_->id.incarnation, 1}, ForkId{fork.incarnation, fork.counter},
                         ForkId{fork.incarnation, fork.counter + 1, fork.nonce}}) {
      EXPECT_FALSE(references.may_use(user_->id, object, made_up).ok());
      EXPECT_FALSE(references.may_use(third_->id, object, made_up).ok());
    }
    EXPECT_FALSE(references.may_use(user_->id, {object.incarnation, object.counter}, fork).ok());
    EXPECT_FALSE(references.may_use(user_->id, {object.incarnation, object.counter + 1, object.nonce}, fork).ok());
  }
}

TEST_F(ReferencesTest, AReferenceMayBeUsedBeforeTheOwnerHasHeardOfIt) {
  auto handle = user_->references->begin_creation(owner_->id);  // the owner has not heard of the object either
  const auto passed = send(*user_, *third_, handle);
  const auto again = send(*third_, *user_, passed);
  EXPECT_FALSE(passed->confirmed());
  EXPECT_TRUE(owner_->references->may_use(third_->id, passed->object(), passed->ids().fork).ok());
  EXPECT_TRUE(owner_->references->may_use(user_->id, again->object(), again->ids().fork).ok());
  const auto early = fetch(*owner_, passed->object());
  ASSERT_TRUE(owner_->references->create(user_->id, handle->ids()).ok());
  owner_->references->fulfil(handle->object(), outcome());
  EXPECT_TRUE(early->ok());
  settle();
  EXPECT_TRUE(passed->confirmed());
}

TEST_F(ReferencesTest, AMadeUpForkIsRefused) {
  const auto handle = create(*user_, *owner_);
  const auto object = handle->object();
  const auto fork = handle->ids().fork;
  std::uint64_t number = 0;
  const auto claim = [&](const RRefId& named, const ForkId& made_up, const AgentId& parent) {
    auto op = ReferenceOp::of(ReferenceOp::Kind::fork, made_up, named);
    op.parent = parent;
    return send_op(*owner_, third_->id, std::move(op), ++number);
  };
  const auto denied = ReferenceResult::Code::denied;
  const RRefId guessed{object.incarnation, object.counter};
  EXPECT_EQ(claim(guessed, {third_->id.incarnation, 1}, third_->id), denied);
  EXPECT_EQ(claim(guessed, {user_->id.incarnation, fork.counter + 1}, user_->id), denied);
  // With the object's number, which only its holders know: a fork that was made for another agent, and none at all.
  EXPECT_EQ(claim(object, fork, user_->id), denied);
  EXPECT_EQ(claim(object, {user_->id.incarnation, fork.counter + 1}, user_->id), denied);
  EXPECT_EQ(owner_->references->counts().forks, 1U);

  // The numbers that the third agent named are still good for the agents that they are made for.
  auto passed = send(*user_, *third_, handle);
  EXPECT_EQ(passed->ids().fork.counter, fork.counter + 1);
  // The simulated third agent has sent no batch of its own; the numbers of its batches continue.
  EXPECT_EQ(claim(passed->object(), passed->ids().fork, user_->id), ReferenceResult::Code::done);
  EXPECT_EQ(owner_->references->counts().forks, 2U);
}

TEST_F(ReferencesTest, WhatOnePeerNamesIsBoundedAndEndsWithIt) {
  // A hostile peer makes up objects, and forks of an object that it holds. Both prove themselves, since it knows their
  // nonces.
  const auto handle = create(*user_, *owner_);
  std::uint64_t number = 0, fork = std::uint64_t{1} << 32;
  const auto claim = [&](const auto& object_of, std::size_t count) {
    std::size_t done = 0;
    while (count != 0) {
      ReferenceBatch batch{owner_->id.incarnation, ++number, {}};
      for (; count != 0 && batch.ops.size() < ReferenceBatch::most_ops; --count) {
        ForkId made{third_->id.incarnation, ++fork};
        const auto object = object_of(fork);
        made.nonce = proof_of(object, made, third_->id.incarnation);
        batch.ops.push_back(ReferenceOp::of(ReferenceOp::Kind::fork, made, object));
        batch.ops.back().parent = third_->id;
      }
      const auto answer = owner_->references->receive_mail(third_->id, encode(batch));
      EXPECT_TRUE(answer.ok());
      const auto results = decode<ReferenceAnswer>(*answer);
      EXPECT_TRUE(results.has_value());
      for (const auto& result : results->results) done += result.code == ReferenceResult::Code::done ? 1U : 0U;
    }
    return done;
  };
  const auto made_up = [&](std::uint64_t counter) { return RRefId{third_->id.incarnation, counter, 7}; };
  constexpr auto most_awaited = References::most_awaited_of_a_peer;
  EXPECT_EQ(claim(made_up, most_awaited + 5000), most_awaited);
  const auto held = [&](std::uint64_t) { return handle->object(); };
  constexpr auto most_forks = References::most_forks_of_a_peer;
  EXPECT_EQ(claim(held, most_forks), most_forks - most_awaited);
  EXPECT_EQ(owner_->references->counts().forks, most_forks + 1);

  const auto other = create(*user_, *owner_);  // the user has bounds of its own
  EXPECT_NE(send(*user_, *owner_, other), nullptr);
  owner_->references->peer_lost(third_->id, Status(Code::connection_lost, "gone"));
  EXPECT_EQ(owner_->references->counts().forks, 2U);
  EXPECT_EQ(owner_->references->counts().objects, 2U);
}

TEST_F(ReferencesTest, AForgedRecordGivesTheOwnerNoHandle) {
  const auto handle = create(*user_, *owner_);
  ReferenceRecord record{owner_->id, handle->object(),       {third_->id.incarnation, 1},
                         third_->id, owner_->id.incarnation, ""};
  for (const auto nonce : {std::uint64_t{0}, handle->ids().fork.nonce}) {
    record.fork.nonce = nonce;
    const auto received = owner_->references->receive(record, third_->id);
    EXPECT_EQ(received.status().code(), Code::permission_denied);
  }
  record.object.nonce ^= 1;  // with a number of its own, the third agent names another object
  record.fork.nonce = proof_of(record.object, record.fork, owner_->id.incarnation);
  EXPECT_EQ(owner_->references->receive(record, third_->id).status().code(), Code::not_found);
}

TEST_F(ReferencesTest, ACreationWithAForeignForkIsRefused) {
  const auto handle = user_->references->begin_creation(owner_->id);
  auto ids = handle->ids();
  ids.fork.nonce ^= 1;
  EXPECT_EQ(owner_->references->create(user_->id, ids).code(), Code::permission_denied);
  EXPECT_TRUE(owner_->references->create(user_->id, handle->ids()).ok());
}

}  // namespace
}  // namespace tensorferry
