#include <atomic>
#include <mutex>

#include "rpc/core/agent_network.h"
#include "rpc/core/envelope.h"
#include "rpc/core/method_target.h"
#include "tests/rpc/cpp/typed_agents.h"

namespace {

using namespace tensorferry;
using namespace tensorferry::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::atomic<int> alive{0};

class Counter {
 public:
  Counter() { ++alive; }
  ~Counter() { --alive; }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  int add(int n) {
    const std::lock_guard lock(mutex_);
    return value_ += n;
  }
  [[nodiscard]] int value() const { return value_; }

 private:
  std::mutex mutex_;
  int value_ = 0;
};

bool becomes(const std::atomic<int>& value, int wanted) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (value != wanted && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
  return value == wanted;
}

class Objects : public TypedAgents {
 protected:
  void SetUp() override {
    alive = 0;
    sim->serve("make", [this] {
      return sim->share_object("Counter", std::make_shared<Counter>(), method("add", &Counter::add, {"n"}),
                               method("value", &Counter::value));
    });
  }

  std::uint64_t mails_ = 0;
};

TEST_F(Objects, AreCalledByTheirMethods) {
  const auto counter = trainer->call<Object>("sim", "make").get();
  EXPECT_EQ(counter.owner(), "sim");
  EXPECT_EQ(counter.type_name(), "Counter");
  EXPECT_EQ(counter.call<int>("add", 2).get(), 2);
  EXPECT_EQ(counter.call<int>("add", 3).get(), 5);
  EXPECT_EQ(counter.call<int>("value").get(), 5);
}

TEST_F(Objects, LiveWhileTheyAreHeld) {
  {
    const auto counter = trainer->call<Object>("sim", "make").get();
    const auto copy = counter;  // NOLINT(performance-unnecessary-copy-initialization): it holds the object too
    EXPECT_EQ(copy.call<int>("add", 1).get(), 1);
    EXPECT_EQ(alive, 1);
  }
  EXPECT_TRUE(becomes(alive, 0));
}

TEST_F(Objects, CanBePassedOn) {
  const auto other = join(store, "other");
  other->serve("use", [](const Object& counter) { return counter.call<int>("add", 10).get(); });
  std::atomic<bool> kept{false};
  Object held;
  other->serve("hold", [&](Object counter) {
    held = std::move(counter);
    kept = true;
  });
  {
    const auto counter = trainer->call<Object>("sim", "make").get();
    EXPECT_EQ(trainer->call<int>("other", "use", counter).get(), 10);
    trainer->call("other", "hold", counter).get();
  }
  EXPECT_EQ(held.call<int>("value").get(), 10);
  EXPECT_EQ(alive, 1);
  held = {};
  EXPECT_TRUE(becomes(alive, 0));
}

TEST_F(Objects, CanReturnToTheirOwner) {
  const auto mine = sim->share_object("Counter", std::make_shared<Counter>(), method("add", &Counter::add));
  trainer->serve("echo", [](Object object) { return object; });
  const auto back = sim->call<Object>("trainer", "echo", mine).get();
  EXPECT_EQ(back.call<int>("add", 4).get(), 4);
}

TEST_F(Objects, NameUnsupportedUses) {
  const auto counter = trainer->call<Object>("sim", "make").get();
  EXPECT_THAT(thrown_by<NotFound>([&] { counter.call("subtract", 1).get(); }),
              HasSubstr("\"Counter\" on \"sim\" has no method \"subtract\" for peers; it has: add, value"));
  EXPECT_THAT(thrown_by<InvalidArgument>([&] { counter.call("add", "x").get(); }),
              HasSubstr("Counter.add(n: int) -> int on \"sim\"; called with (str)"));
  EXPECT_THROW(Object().call("add", 1), InvalidArgument);
  EXPECT_THROW(trainer->call("sim", "make", Object()), InvalidArgument);
}

TEST_F(Objects, AreLostWithTheirOwner) {
  const auto counter = trainer->call<Object>("sim", "make").get();
  EXPECT_EQ(counter.call<int>("add", 1).get(), 1);
  sim->leave();
  EXPECT_THROW(counter.call<int>("add", 1).get(), Error);
}

TEST_F(Objects, OutliveTheirAgentAsHandles) {
  auto counter = trainer->call<Object>("sim", "make").get();
  trainer.reset();
  EXPECT_THROW(counter.call<int>("add", 1).get(), Error);
  counter = {};
}

// A stranger that knows what everybody in the job can read: names, incarnations, and that numbers count from 1.
TEST_F(Objects, AreOfNoUseToAStranger) {
  RawAgentOptions options;
  options.name = "stranger";
  options.store = store;
  const auto stranger = *RawAgent::create(std::move(options));
  ASSERT_TRUE(stranger->announce().ok());
  const auto made = trainer->call<Object>("sim", "make").get();
  const auto shared = sim->share_object("Counter", std::make_shared<Counter>(), method("add", &Counter::add));
  sim->serve("add_ten", [](const Object& counter) { return counter.call<int>("add", 10).get(); });
  EXPECT_EQ(made.call<int>("add", 1).get(), 1);

  const auto incarnation = [&](const std::string& name) { return stranger->find(name, 2s)->incarnation; };
  const AgentId owner{"sim", incarnation("sim")}, self{"stranger", stranger->self().incarnation};
  const auto refused = [&](std::string_view function, Message message) {
    auto call = stranger->call("sim", function, std::move(message));
    call.wait();
    const auto reply = call.take();
    EXPECT_EQ(reply.status().code(), Code::permission_denied) << function;
    return std::string(reply.status().what());
  };
  for (const auto creator : {owner.incarnation, incarnation("trainer"), self.incarnation}) {
    for (const RRefId object : {RRefId{creator, 1}, RRefId{creator, 2, 2}}) {
      for (const ForkId fork : {ForkId{}, ForkId{owner.incarnation, 1}, ForkId{incarnation("trainer"), 1, 1}}) {
        Encoder method;
        begin_request(method, 2);
        method.bytes(encode(MethodTarget{owner.incarnation, object, fork, "add"}), [] { return Owner(); });
        method.integer(100);
        begin_keywords(method, 0);
        EXPECT_THAT(refused(method_function, method.take()),
                    AllOf(HasSubstr("\"stranger\" holds no reference to the object"), HasSubstr("of \"sim\"")));

        Encoder fetch;
        fetch.raw(Fetch{owner.incarnation, object, fork});
        EXPECT_THAT(refused(fetch_function, fetch.take()), HasSubstr("\"stranger\" holds no reference"));

        Encoder argument;  // asks the owner's own function to use the object
        begin_request(argument, 1);
        argument.reference({owner, object, fork, self, owner.incarnation, ""});
        begin_keywords(argument, 0);
        auto call = stranger->call("sim", "add_ten", argument.take());
        call.wait();
        const auto reply = call.take();
        EXPECT_TRUE(!reply.ok() || reply->payload.front() != std::byte{0}) << "the function ran";

        auto claim = ReferenceOp::of(ReferenceOp::Kind::fork, fork, object);
        claim.parent = self;
        const auto remove = ReferenceOp::of(ReferenceOp::Kind::remove, fork, object);
        Message mail;
        mail.payload = encode(ReferenceBatch{owner.incarnation, ++mails_, {claim, remove}});
        auto sent = stranger->call("sim", reference_function, std::move(mail));
        sent.wait();
        const auto answered = sent.take();
        ASSERT_TRUE(answered.ok()) << answered.status().text();
        const auto answer = decode<ReferenceAnswer>(answered->payload);
        ASSERT_TRUE(answer && answer->results.size() == 2);
        EXPECT_EQ(answer->results[0].code, ReferenceResult::Code::denied);
      }
    }
  }
  EXPECT_EQ(made.call<int>("value").get(), 1);
  EXPECT_EQ(shared.call<int>("add", 1).get(), 1);
  EXPECT_EQ(alive, 2);
  stranger->leave();
}

}  // namespace
