#include <atomic>
#include <stdexcept>
#include <thread>

#include "rpc/core/envelope.h"
#include "rpc/cpp/failures.h"
#include "tensorferry/channel.h"
#include "tensorferry/plugin.h"
#include "tests/agent/mail_channel.h"
#include "tests/agent/sockets.h"
#include "tests/rpc/cpp/typed_agents.h"

namespace {

using namespace tensorferry;
using namespace tensorferry::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Step {
  Tensor observation;
  double reward = 0;
  bool done = false;
};

}  // namespace

template <>
struct tensorferry::Value<Step> : tensorferry::Fields<"Step", &Step::observation, &Step::reward, &Step::done> {};

namespace {

struct Celsius {
  double degrees = 0;
};

}  // namespace

template <>
struct tensorferry::Value<Celsius> {
  static std::string name() { return "Celsius"; }
  static void write(ValueWriter& out, const Celsius& value) { out.text(std::to_string(value.degrees) + " C"); }
  static Celsius read(ValueReader& in) { return {std::stod(in.text())}; }
};

namespace {

int add(int a, int b) { return a + b; }

TEST_F(TypedAgents, CallEachOtherByName) {
  sim->serve("add", &add);
  trainer->serve("greet", [](const std::string& name) { return "hello " + name; });
  EXPECT_EQ(trainer->call<int>("sim", "add", 40, 2).get(), 42);
  EXPECT_EQ(sim->call<std::string>("trainer", "greet", "sim").get(), "hello sim");
  EXPECT_EQ(sim->call<int>("sim", "add", 1, 2).get(), 3);
}

TEST_F(TypedAgents, DeduceArgumentsAndResults) {
  sim->serve("everything", [](bool a, std::int8_t b, std::uint64_t c, float d, std::string_view e,
                              const std::vector<std::byte>& f, std::vector<std::string> g,
                              std::tuple<int, std::optional<double>> h, const std::map<std::string, int>& i) {
    return std::tuple(a, b, c, d, std::string(e), f, std::move(g), h, i);
  });
  using Out = std::tuple<bool, std::int8_t, std::uint64_t, float, std::string, std::vector<std::byte>,
                         std::vector<std::string>, std::tuple<int, std::optional<double>>, std::map<std::string, int>>;
  const Out sent(true, -128, UINT64_MAX, 0.5F, "text", {std::byte{1}, std::byte{0}}, {"a", ""}, {7, std::nullopt},
                 {{"x", 1}, {"y", -1}});
  const auto call = [&](const auto&... values) { return trainer->call<Out>("sim", "everything", values...).get(); };
  EXPECT_EQ(std::apply(call, sent), sent);
}

TEST_F(TypedAgents, CarryTensors) {
  sim->serve("scale", [](const TensorOf<float>& tensor, float by) {
    auto out = tensor.clone();
    for (auto& each : out.elements<float>()) each *= by;
    return out;
  });
  for (const std::size_t count : {1U, 5U, 100'000U}) {
    const auto out =
        trainer->call<Tensor>("sim", "scale", Tensor::from_vector(std::vector<float>(count, 1.5F)), 2).get();
    EXPECT_EQ(out.dtype(), DType::float32);
    ASSERT_EQ(out.shape(), Tensor::Shape{static_cast<std::int64_t>(count)});
    for (const auto each : out.elements<float>()) ASSERT_EQ(each, 3.0F);
  }
}

TEST_F(TypedAgents, CarryUserDefinedStructs) {
  sim->serve("step", [](const Step& before, int n) { return Step{before.observation, before.reward + n, n > 2}; });
  const auto step = trainer->call<Step>("sim", "step", Step{Tensor::scalar(1.0), 0.5, false}, 3).get();
  EXPECT_EQ(step.observation.item<double>(), 1.0);
  EXPECT_EQ(step.reward, 3.5);
  EXPECT_TRUE(step.done);

  sim->serve("warmer", [](Celsius celsius) { return Celsius{celsius.degrees + 1}; });
  EXPECT_EQ(trainer->call<Celsius>("sim", "warmer", Celsius{20}).get().degrees, 21);
}

TEST_F(TypedAgents, ReportTheSignatureIfArgumentsDoNotFit) {
  sim->serve("stepper", [](const TensorOf<float>& action, int n) { return action.size() * 1.0 + n; }, {"action", "n"});
  const auto complaint = [&](const auto&... arguments) {
    return thrown_by<InvalidArgument>([&] { trainer->call<double>("sim", "stepper", arguments...).get(); });
  };
  EXPECT_THAT(complaint("left"),
              HasSubstr("stepper(action: float32 tensor, n: int) -> float on \"sim\"; called with (str)"));
  EXPECT_THAT(complaint(), HasSubstr("called with ()"));
  EXPECT_THAT(complaint(Tensor::scalar(1.0), 1), HasSubstr("called with (float64 tensor, int)"));
  EXPECT_THAT(complaint(Tensor::scalar(1.0F), 1, 2), HasSubstr("called with (float32 tensor, int, int)"));
  EXPECT_THAT(complaint(Tensor::scalar(1.0F), 1e9), HasSubstr("called with (float32 tensor, float)"));
  EXPECT_THAT(complaint(Tensor::scalar(1.0F), INT64_MAX), HasSubstr("called with (float32 tensor, int)"));
  EXPECT_THAT(complaint(std::vector<int>{1}, std::tuple(1, "a")), HasSubstr("called with (list, tuple[int, str])"));
}

TEST_F(TypedAgents, ReportTheTypeOfAResultThatDoesNotFit) {
  sim->serve("name", [] { return std::vector<std::string>{"sim"}; });
  EXPECT_THAT(thrown_by<InvalidArgument>([&] { trainer->call<double>("sim", "name").get(); }),
              HasSubstr("\"name\" on \"sim\" returned list, not float"));
  EXPECT_THAT(thrown_by<InvalidArgument>([&] { trainer->call<std::vector<int>>("sim", "name").get(); }),
              HasSubstr("returned list, not list[int] (in it: not int)"));
  trainer->call("sim", "name").get();  // a call<void> accepts any result
}

TEST_F(TypedAgents, LeaveOutTrailingOptionalArguments) {
  sim->serve("reset", [](int level, std::optional<int> seed, std::optional<std::string> name) {
    return std::to_string(level) + "/" + std::to_string(seed.value_or(-1)) + "/" + name.value_or("none");
  });
  EXPECT_EQ(trainer->call<std::string>("sim", "reset", 1).get(), "1/-1/none");
  EXPECT_EQ(trainer->call<std::string>("sim", "reset", 1, 2).get(), "1/2/none");
  EXPECT_EQ(trainer->call<std::string>("sim", "reset", 1, std::optional<int>(), "x").get(), "1/-1/x");
}

TEST_F(TypedAgents, PropagateExceptions) {
  sim->serve("fail", [](int how) {
    if (how == 0) throw std::out_of_range("no such level");
    if (how == 1) throw NotFound("no such map");
    throw how;
  });
  try {
    trainer->call("sim", "fail", 0).get();
    FAIL();
  } catch (const RemoteError& error) {
    EXPECT_EQ(error.type_name(), "std::out_of_range");
    EXPECT_EQ(error.message(), "no such level");
    EXPECT_EQ(error.peer(), "sim");
    EXPECT_THAT(error.what(), AllOf(HasSubstr("std::out_of_range: no such level"), HasSubstr("raised on sim")));
  }
  EXPECT_EQ(thrown_by<NotFound>([&] { trainer->call("sim", "fail", 1).get(); }), "no such map");
  EXPECT_THAT(thrown_by<RemoteError>([&] { trainer->call("sim", "fail", 2).get(); }), HasSubstr("int"));
}

TEST(Errors, EachCodeHasAClassAndEachClassItsCode) {
  for (int number = 1; number < code_count; ++number) {
    const auto code = static_cast<Code>(number);
    RemoteException described;
    try {
      detail::throw_status(Status(code, "as asked"));
    } catch (...) {
      const auto status = detail::describe_thrown(std::current_exception(), "sim", described);
      if (code == Code::remote_error) {
        EXPECT_EQ(described.text, "as asked");
      } else {
        EXPECT_EQ(status.text(), Status(code, "as asked").text());
      }
    }
  }
}

TEST_F(TypedAgents, NameUnknownFunctionsAndPeers) {
  EXPECT_THAT(thrown_by<NotFound>([&] { trainer->call("sim", "nothing").get(); }), HasSubstr("nothing"));
  EXPECT_THAT(thrown_by<NotFound>([&] { trainer->call("nobody", "f").get(); }), HasSubstr("nobody"));
  EXPECT_THAT(thrown_by<InvalidArgument>([&] { sim->serve("py:math:sin", &add); }), HasSubstr("py:math:sin"));
  EXPECT_THROW(join(store, "sim"), InvalidArgument);
  EXPECT_THROW(Agent::join({.name = "x", .rendezvous = "carrier-pigeon://"}), InvalidArgument);
}

TEST_F(TypedAgents, KeepDeadlines) {
  sim->serve("hang", [](const CallContext& call) {
    while (!call.cancelled()) std::this_thread::sleep_for(1ms);
  });
  const auto began = std::chrono::steady_clock::now();
  EXPECT_THROW(trainer->call_with({.timeout = 50ms}, "sim", "hang").get(), DeadlineExceeded);
  EXPECT_LT(std::chrono::steady_clock::now() - began, patience);
}

TEST_F(TypedAgents, SayWhetherTheCallerSetTheTimeOut) {
  RawAgentOptions options;
  options.name = "callee";
  options.store = store;
  const auto callee = *RawAgent::create(std::move(options));
  std::vector<bool> timed;
  callee->serve("note", [&](const Request& request, Reply reply) {
    Decoder in(request.arguments.payload, request.arguments.buffers);
    timed.push_back(read_request(in).timed);
    Encoder out;
    begin_reply(out, ReplyKind::value);
    out.none();
    reply.send(out.take());
  });
  ASSERT_TRUE(callee->announce().ok());
  trainer->call("callee", "note").get();
  trainer->call_with({.timeout = 10s}, "callee", "note").get();
  trainer->call_with({.timeout = 0ms}, "callee", "note").get();
  EXPECT_EQ(timed, (std::vector<bool>{false, true, true}));
  callee->leave();
}

TEST_F(TypedAgents, TellFunctionsTheirCallerAndDeadline) {
  sim->serve("who", [](const CallContext& call, int n) {
    return std::tuple(std::string(call.peer()), call.rank(), call.deadline().has_value(), n);
  });
  const auto who = trainer->call<std::tuple<std::string, int, bool, int>>("sim", "who", 7).get();
  EXPECT_EQ(who, std::tuple("trainer", -1, true, 7));
  EXPECT_FALSE(std::get<2>(
      trainer->call_with<std::tuple<std::string, int, bool, int>>({.timeout = 0ms}, "sim", "who", 7).get()));
}

TEST_F(TypedAgents, CancelCalls) {
  std::atomic<bool> started{false}, noticed{false};
  sim->serve("hang", [&](const CallContext& call) {
    started = true;
    while (!call.cancelled()) std::this_thread::sleep_for(1ms);
    noticed = true;
  });
  auto future = trainer->call_with({.timeout = 0ms}, "sim", "hang");
  EXPECT_FALSE(future.wait_for(20ms));
  const auto becomes = [until = std::chrono::steady_clock::now() + patience](const std::atomic<bool>& flag) {
    while (!flag && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
    return flag.load();
  };
  ASSERT_TRUE(becomes(started)) << "a call that is cancelled before does not run";
  future.cancel();
  EXPECT_THROW(future.get(), Cancelled);
  EXPECT_TRUE(becomes(noticed));
}

TEST_F(TypedAgents, SendIdempotentCallsAgain) {
  std::atomic<int> runs{0};
  std::atomic<bool> held{true};
  sim->serve("scale", [&](const TensorOf<float>& tensor, float by) {
    ++runs;
    while (held) std::this_thread::sleep_for(1ms);
    auto out = tensor.clone();
    for (auto& each : out.elements<float>()) each *= by;
    return out;
  });
  const auto tensor = Tensor::from_vector(std::vector<float>(1000, 1.5F));
  auto future = trainer->call_with<Tensor>({.timeout = patience, .idempotent = true}, "sim", "scale", tensor, 2);
  const auto has_run = [&](int times) {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (runs < times && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
    return runs >= times;
  };
  EXPECT_TRUE(has_run(1));
  sever_connections();
  EXPECT_TRUE(has_run(2)) << "it was not sent again";
  EXPECT_FALSE(future.wait_for(0ms));
  held = false;
  const auto out = future.get();
  for (const auto each : out.elements<float>()) ASSERT_EQ(each, 3.0F);
  EXPECT_THROW(trainer->call_with({.order = 1, .idempotent = true}, "sim", "scale", tensor, 2).get(), InvalidArgument);
}

TEST_F(TypedAgents, ReplyLaterByAFuture) {
  sim->serve("soon", [](int n) {
    Promise<int> promise;
    auto future = promise.future();
    std::thread([promise = std::move(promise), n]() mutable { promise.set(n + 1); }).detach();
    return future;
  });
  sim->serve("broken", [] { return Promise<int>().future(); });
  sim->serve("relay", [this](int n) { return sim->call<int>("trainer", "double", n); });
  trainer->serve("double", [](int n) { return 2 * n; });
  EXPECT_EQ(trainer->call<int>("sim", "soon", 1).get(), 2);
  EXPECT_THROW(trainer->call<int>("sim", "broken").get(), Cancelled);
  EXPECT_EQ(trainer->call<int>("sim", "relay", 21).get(), 42);
}

TEST_F(TypedAgents, ServeManyCallersAtOnce) {
  sim->serve("add", &add);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&, i] {
      for (int n = 0; n < 500; ++n) wrong += trainer->call<int>("sim", "add", i, n).get() != i + n;
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(TypedAgents, FindPeersByRankAndExplain) {
  const auto ranked = Agent::join({.rank = 3, .store = store});
  EXPECT_EQ(ranked->name(), "worker3");
  EXPECT_EQ(sim->peer(3), "worker3");
  sim->serve("add", &add);
  EXPECT_EQ(trainer->call<int>("sim", "add", 1, 1).get(), 2);
  EXPECT_THAT(trainer->explain("sim"), HasSubstr("sim: cpu -> cpu by"));
}

TEST(TypedAgent, AChannelOfTheProgramCarriesAtItsPriority) {
  const auto store = local_store();
  const auto with_mail = [&](const char* name) {
    return Agent::join({.name = name, .store = store, .register_channels = [](Registry& channels) {
                          channels.add("mail", 1000, [] { return std::make_unique<MailDriver>(MailBehaviour()); });
                        }});
  };
  const auto sim = with_mail("sim"), trainer = with_mail("trainer");
  const auto size = [](const Tensor& received) { return static_cast<int>(received.size()); };
  sim->serve("size", size);
  const auto values = Tensor::from_vector(std::vector<float>(10'000));
  EXPECT_EQ(trainer->call_with<int>({.require = "mail"}, "sim", "size", values).get(), 10'000);
  EXPECT_THAT(trainer->explain("sim"), HasSubstr("sim: cpu -> cpu by mail"));

  const auto without = join(store, "without");
  without->serve("size", size);
  EXPECT_EQ(trainer->call<int>("without", "size", values).get(), 10'000);  // the built-in channels carry
}

TEST(TypedAgent, AChannelOfTheProcessReachesAgentsMadeWhileItIsRegistered) {
  const auto store = local_store();
  const auto before = join(store, "before");
  {
    const ChannelPlugin mail("mail", 90, [] { return std::make_unique<MailDriver>(MailBehaviour()); });
    const auto sim = join(store, "sim");
    const auto trainer = Agent::join({.name = "trainer", .store = store, .channels = "mail:1000"});
    sim->serve("size", [](const Tensor& received) { return static_cast<int>(received.size()); });
    const auto values = Tensor::from_vector(std::vector<float>(10'000));
    EXPECT_EQ(trainer->call_with<int>({.require = "mail"}, "sim", "size", values).get(), 10'000);
    EXPECT_THAT(trainer->explain("sim"), HasSubstr("sim: cpu -> cpu by mail"));
    EXPECT_THAT(before->explain("sim"), Not(HasSubstr("mail: usable")));
    const ChannelPlugin again("mail", 80, [] { return std::make_unique<MailDriver>(MailBehaviour()); });
    const auto refused = thrown_by<InvalidArgument>([&] { join(store, "late"); });
    EXPECT_THAT(refused, HasSubstr("\"channel mail\" is registered twice in this process"));
  }
  EXPECT_THAT(join(store, "after")->explain("before"), Not(HasSubstr("mail")));
}

TEST(TypedWorld, BeginsAndEndsTogether) {
  const auto store = local_store();
  const auto member = [&](int rank) {
    const auto agent = Agent::join(
        {.rank = rank, .world_size = 3, .store = store, .prepare = [](Agent& self) { self.serve("add", &add); }});
    for (int peer = 0; peer < 3; ++peer)
      EXPECT_EQ(agent->call<int>(agent->peer(peer), "add", rank, peer).get(), rank + peer);
    agent->shutdown();
  };
  std::thread one(member, 1), two(member, 2);
  member(0);
  one.join();
  two.join();
}

TEST(TypedWorld, JoinsAtAStoreThatAnAgentServes) {
  StoreServer server;
  const auto where = "store://127.0.0.1:" + std::to_string(server.port());
  const auto a = Agent::join({.name = "a", .rendezvous = where});
  const auto b = Agent::join({.name = "b", .rendezvous = where});
  a->serve("add", &add);
  EXPECT_EQ(b->call<int>("a", "add", 1, 2).get(), 3);
}

}  // namespace
