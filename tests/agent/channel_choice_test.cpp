// The choice of the channel that carries a buffer between two agents, and how explain() describes it.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <future>
#include <optional>

#include "base/log.h"
#include "tests/agent/agents.h"
#include "tests/agent/mail_channel.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::string what(const Status& status) { return std::string(status.what()); }

Message buffer_message(std::size_t bytes, unsigned seed = 1) {
  auto message = message_of("m");
  message.buffers = {patterned(bytes, seed)};
  return message;
}

std::string reason_of(const Route& route, const std::string& channel) {
  const auto it = std::find_if(route.candidates.begin(), route.candidates.end(),
                               [&](const auto& c) { return c.channel == channel; });
  return it == route.candidates.end() ? "no such candidate" : it->usable ? "usable" : it->reason;
}

std::size_t lines_with(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

RawCallOptions requiring(const std::string& channel, std::uint32_t order = 0) {
  RawCallOptions options;
  options.require = channel;
  options.order = order;
  return options;
}

class ChannelChoice : public ::testing::Test {
 protected:
  void join_both(const std::function<void(RawAgentOptions&)>& change_a = {},
                 const std::function<void(RawAgentOptions&)>& change_b = {}, const Ways& ways = {}) {
    a = join(store, "a", ways, change_a);
    b = join(store, "b", ways, change_b ? change_b : change_a);
    serve_echo(*b);
  }
  /// Calls "echo" with a buffer, and checks the bytes that come back.
  Status echo(std::size_t bytes, const std::string& require = {}) {
    auto message = buffer_message(bytes, static_cast<unsigned>(bytes));
    const auto reply = call_sync(*a, "b", "echo", message, requiring(require));
    if (reply.ok()) {
      EXPECT_TRUE(same_bytes(reply->buffers.at(0), message.buffers[0])) << bytes;
    }
    return reply.status();
  }
  /// Makes a call that b answers in link_held(). It fails if the link between the two is lost meanwhile.
  void hold_link() {
    b->serve("hold", [this](const Request&, Reply reply) { held_reply.set_value(std::move(reply)); });
    held_reply = {};
    held_call.emplace(a->call("b", "hold", message_of("m")));
  }
  bool link_held() {
    held_reply.get_future().get().send(message_of("held"));
    return held_call->wait(Clock().now() + long_enough) && held_call->take().ok();
  }
  std::promise<Reply> held_reply;
  std::optional<Call> held_call;
  std::uint64_t sent_by(const std::string& channel) { return a->counters().bytes_sent[channel]; }
  std::string usable_soon(const std::string& channel) {
    std::string reason;
    eventually([&] {
      const auto route = a->explain("b");
      reason = route.ok() ? reason_of(*route, channel) : what(route.status());
      return reason == "usable";
    });
    return reason;
  }
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::shared_ptr<RawAgent> a, b;
};

// ---- Explaining

TEST_F(ChannelChoice, ExplainNamesTheChannelWhoseCounterRises) {
  for (const Ways& ways : {Ways{"ring", ""}, Ways{"unix", "basic"}, Ways{"tcp", "basic"}, Ways{"ring", "basic"}}) {
    join_both({}, {}, ways);
    for (const std::size_t bytes : {0UL, 100UL, 4096UL, 4097UL, 200'000UL, 3'000'000UL}) {
      const auto route = a->explain("b", {}, {}, bytes);
      ASSERT_TRUE(route.ok()) << route.status().text();
      EXPECT_EQ(route->transport, ways.transport);
      const auto before = a->counters();
      const auto received = b->counters();
      ASSERT_TRUE(echo(bytes).ok());
      for (const auto& [channel, count] : a->counters().bytes_sent) {
        const auto was = before.bytes_sent.contains(channel) ? before.bytes_sent.at(channel) : 0;
        EXPECT_EQ(count - was, channel == route->channel ? bytes : 0) << channel << " " << bytes;
      }
      EXPECT_EQ(b->counters().bytes_received[route->channel] -
                    (received.bytes_received.contains(route->channel) ? received.bytes_received.at(route->channel) : 0),
                bytes);
      EXPECT_EQ(route->channel, bytes <= 4096 ? "inline" : ways.channels.empty() ? "xth" : "basic");
    }
    a->leave();
    b->leave();
  }
}

TEST_F(ChannelChoice, ExplainGivesAReasonForEveryChannelThatIsNotChosen) {
  a = join(store, "a");
  RawPeer other(store, "other");  // announces basic alone
  std::thread accepting([&] {
    auto peer = other.accept();
    EXPECT_TRUE(peer.connection.ended());
  });
  const auto route = a->explain("other");
  ASSERT_TRUE(route.ok()) << route.status().text();
  EXPECT_EQ(route->channel, "basic");
  EXPECT_THAT(reason_of(*route, "xth"), HasSubstr("the peer does not have it for its cpu"));
  const auto gpu = a->explain("other", {}, {.all = Device{DeviceType::cuda, 1}, .map = {}});
  EXPECT_EQ(gpu.status().code(), Code::invalid_argument);
  EXPECT_THAT(std::string(gpu.status().what()), HasSubstr("cuda:1 of \"other\", which has cpu"));
  const auto staged = a->explain("other", {DeviceType::cuda, 1});
  ASSERT_TRUE(staged.ok());
  EXPECT_EQ(staged->channel, "");
  EXPECT_EQ(staged->remote, Device());
  EXPECT_THAT(reason_of(*staged, "basic"), HasSubstr("cuda:1"));
  a->leave();
  accepting.join();
}

TEST_F(ChannelChoice, ExplainOfAnUnknownPeerFails) {
  a = join(store, "a");
  EXPECT_EQ(a->explain("nobody").status().code(), Code::not_found);
}

TEST_F(ChannelChoice, CountersCountCalls) {
  join_both();
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(echo(10).ok());
  EXPECT_FALSE(call_sync(*a, "b", "unknown", {}).ok());
  EXPECT_EQ(a->counters().calls_sent, 11U);
  EXPECT_EQ(a->counters().calls_failed, 1U);
  EXPECT_TRUE(eventually([&] { return b->counters().calls_served == 11; }));
}

// ---- A pair that one end alone wants

/// The peer may come to another decision: it sees other devices, or is another version.
TEST_F(ChannelChoice, AChannelThatTheOtherEndDoesNotWantIsRefusedAndTheNextOneCarries) {
  MailBehaviour unwanting;
  unwanting.wanted = false;
  for (const bool unwanting_first : {false, true}) {
    const auto change = [&](const MailBehaviour& behaviour) {
      return [behaviour](RawAgentOptions& options) { options.registry = with_mail(behaviour); };
    };
    join_both(change(unwanting_first ? unwanting : MailBehaviour()),
              change(unwanting_first ? MailBehaviour() : unwanting));
    hold_link();
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(echo(100'000).ok());
    if (!unwanting_first) {
      EXPECT_TRUE(eventually([&] {
        return reason_of(*a->explain("b"), "mail") == "at the peer: this end takes no letters";
      })) << reason_of(*a->explain("b"), "mail");
    }
    const auto required = echo(100'000, "mail");
    EXPECT_EQ(required.code(), Code::channel_unavailable) << required.text();
    EXPECT_THAT(what(required), HasSubstr("takes no letters"));
    EXPECT_EQ(sent_by("mail"), 0U);
    EXPECT_TRUE(link_held()) << "the link was lost";
    a->leave();
    b->leave();
  }
}

TEST_F(ChannelChoice, ATicketOfAnUnwantedImmediateChannelFailsItsCallAlone) {
  MailBehaviour immediate, unwanting;
  immediate.immediate = unwanting.immediate = true;
  unwanting.wanted = false;
  join_both([&](RawAgentOptions& options) { options.registry = with_mail(immediate); },
            [&](RawAgentOptions& options) { options.registry = with_mail(unwanting); });
  hold_link();
  const auto first = echo(100'000);
  EXPECT_EQ(first.code(), Code::channel_unavailable) << first.text();
  EXPECT_TRUE(eventually([&] { return echo(100'000).ok(); }));
  EXPECT_EQ(reason_of(*a->explain("b"), "mail"), "at the peer: this end takes no letters");
  EXPECT_TRUE(link_held()) << "the link was lost";
}

// ---- Shared memory

TEST_F(ChannelChoice, SharedBlocksCarryOnceTheyAreWarmAndFallBackSilentlyBefore) {
  join_both([](RawAgentOptions& options) { options.channels = "shm,basic"; });
  ASSERT_EQ(usable_soon("shm"), "usable");
  log_rate::forget();
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(echo(1'000'000).ok());
  EXPECT_EQ(sent_by("basic"), 1'000'000U);
  EXPECT_TRUE(eventually([&] { return echo(1'000'000).ok() && sent_by("shm") > 0; }));
  EXPECT_TRUE(eventually([&] { return echo(1'000'000).ok() && b->counters().bytes_sent["shm"] > 0; }));
  EXPECT_EQ(lines_with(::testing::internal::GetCapturedStderr(), "fallback"), 0U);
}

TEST_F(ChannelChoice, SharedBlocksThatAreRequiredDoNotWaitUntilTheyAreWarm) {
  join_both([](RawAgentOptions& options) { options.channels = "shm,basic"; });
  ASSERT_EQ(usable_soon("shm"), "usable");
  ASSERT_TRUE(echo(1'000'000, "shm").ok());
  EXPECT_EQ(sent_by("shm"), 1'000'000U);
}

TEST_F(ChannelChoice, SharedBlocksNeedAUnixSocket) {
  join_both({}, {}, Ways{"tcp", "shm,basic"});
  EXPECT_TRUE(eventually([&] {
    const auto route = a->explain("b");
    return route.ok() && reason_of(*route, "shm").find("the link has no unix socket") != std::string::npos;
  }));
  ASSERT_TRUE(echo(1'000'000).ok());
  EXPECT_EQ(sent_by("basic"), 1'000'000U);
}

TEST_F(ChannelChoice, SharedBlocksAreNotUsedIfMemoryMustNotBeShared) {
  join_both([](RawAgentOptions& options) { options.channels = "shm,basic"; },
            [](RawAgentOptions& options) {
              options.channels = "-xth";
              options.shared_memory = false;
            });
  ASSERT_TRUE(echo(1'000'000).ok());
  EXPECT_EQ(sent_by("basic"), 1'000'000U);
  EXPECT_THAT(reason_of(*a->explain("b"), "shm"), HasSubstr("the peer does not have it"));
  EXPECT_THAT(reason_of(*b->explain("a"), "shm"), HasSubstr("switched off by this agent's options"));
}

// ---- Requiring

TEST_F(ChannelChoice, ARequiredChannelPrecedesAFasterOne) {
  join_both();
  ASSERT_TRUE(echo(100'000, "basic").ok());
  EXPECT_EQ(sent_by("basic"), 100'000U);
  EXPECT_EQ(sent_by("xth"), 0U);
  ASSERT_TRUE(echo(100'000, "xth").ok());
  EXPECT_EQ(sent_by("xth"), 100'000U);
}

TEST_F(ChannelChoice, ARequiredChannelThatCannotCarryFailsTheCallRatherThanFallingBack) {
  join_both([](RawAgentOptions& options) { options.registry = with_mail({.refuses_every_second = true}); });
  ASSERT_EQ(usable_soon("mail"), "usable");
  int failed = 0;
  for (int i = 0; i < 10; ++i) {
    const auto status = echo(10'000, "mail");
    if (status.ok()) continue;
    ++failed;
    EXPECT_EQ(status.code(), Code::channel_unavailable);
    EXPECT_THAT(what(status),
                AllOf(HasSubstr("cpu -> b cpu with require=\"mail\""), HasSubstr("mail: no stamp for letter")));
  }
  EXPECT_EQ(failed, 5);
  EXPECT_EQ(sent_by("basic") + sent_by("xth"), 0U);
  const auto unknown = echo(10'000, "pigeon");
  EXPECT_EQ(unknown.code(), Code::channel_unavailable);
  EXPECT_THAT(what(unknown), HasSubstr("there is no channel of that name"));
}

TEST_F(ChannelChoice, ARequiredChannelThatDoesNotReachThePeerFailsWithTheReason) {
  join_both({}, [](RawAgentOptions& options) { options.channels = "basic"; });
  const auto status = echo(10'000, "xth");
  EXPECT_EQ(status.code(), Code::channel_unavailable);
  EXPECT_THAT(what(status), HasSubstr("xth: the peer does not have it"));
}

/// Holds back the answers that end the probes of mail, until release().
class KeptBack {
 public:
  std::function<void(RawAgentOptions&)> mail(const Status& probe = {}) {
    return [this, probe](RawAgentOptions& options) {
      options.registry = with_mail({.asked = [this](auto answer) { keep(std::move(answer)); }, .probe = probe});
    };
  }
  void release() {
    std::vector<std::function<void()>> kept;
    {
      const std::lock_guard lock(mutex_);
      released_ = true;
      kept.swap(kept_);
    }
    for (const auto& answer : kept) answer();
  }

 private:
  void keep(std::function<void()> answer) {
    {
      const std::lock_guard lock(mutex_);
      if (!released_) return kept_.push_back(std::move(answer));
    }
    answer();
  }
  std::mutex mutex_;
  bool released_ = false;
  std::vector<std::function<void()>> kept_;
};

TEST_F(ChannelChoice, ACallWaitsForTheProbeOfItsRequiredChannel) {
  KeptBack probes;
  join_both(probes.mail());
  auto call = a->call("b", "echo", buffer_message(10'000), requiring("mail"));
  EXPECT_TRUE(echo(10'000).ok()) << "other calls continue";
  EXPECT_FALSE(call.wait(Clock().now() + milliseconds(50)));
  probes.release();
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  const auto reply = call.take();
  EXPECT_TRUE(reply.ok()) << reply.status().text();
  EXPECT_EQ(sent_by("mail"), 10'000U);
}

TEST_F(ChannelChoice, ARequiredChannelWhoseProbeFailsGivesTheReason) {
  KeptBack probes;
  join_both(probes.mail({Code::permission_denied, "the box is locked"}));
  auto call = a->call("b", "echo", buffer_message(10'000), requiring("mail"));
  probes.release();
  ASSERT_TRUE(call.wait(Clock().now() + long_enough));
  const auto status = call.take().status();
  EXPECT_EQ(status.code(), Code::channel_unavailable);
  EXPECT_THAT(what(status), HasSubstr("the box is locked"));
}

TEST_F(ChannelChoice, CallsWithOneOrderKeyStayBehindACallThatWaitsForAProbe) {
  KeptBack probes;
  join_both(probes.mail());
  std::mutex mutex;
  std::vector<std::string> began;
  b->serve("note", [&](Request request, Reply reply) {
    {
      const std::lock_guard lock(mutex);
      began.emplace_back(text_of(request.arguments.payload));
    }
    reply.send({});
  });
  const auto note = [&](const std::string& name, const RawCallOptions& options) {
    auto message = buffer_message(10'000);
    message.payload = bytes_of(name);
    return a->call("b", "note", std::move(message), options);
  };
  std::vector<Call> calls;
  calls.push_back(note("first", requiring("mail", 7)));
  calls.push_back(note("second", requiring("", 7)));
  calls.push_back(note("third", requiring("mail", 7)));
  calls.push_back(note("fourth", requiring("", 7)));
  auto other = note("of another order", requiring("", 8));
  ASSERT_TRUE(other.wait(Clock().now() + long_enough));
  probes.release();
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait(Clock().now() + long_enough));
    EXPECT_TRUE(call.take().ok());
  }
  EXPECT_THAT(began, ::testing::ElementsAre("of another order", "first", "second", "third", "fourth"));
  ASSERT_TRUE(note("fifth", requiring("", 7)).wait(Clock().now() + long_enough));
}

TEST_F(ChannelChoice, CallsBehindAProbeThatNeverEndsAreReleasedWithTheLink) {
  KeptBack probes;
  join_both(probes.mail());
  ASSERT_TRUE(echo(100).ok());  // so that the calls wait for the probe, and not for the link
  std::vector<std::weak_ptr<void>> sources;
  std::vector<Call> calls;
  for (int i = 0; i < 4; ++i) {
    auto message = buffer_message(10'000);
    sources.push_back(message.buffers[0].owner);
    calls.push_back(a->call("b", "echo", std::move(message), requiring(i % 2 == 0 ? "mail" : "", 7)));
  }
  EXPECT_FALSE(calls.back().wait(Clock().now() + milliseconds(50)));
  b->leave();
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait(Clock().now() + long_enough));
    EXPECT_EQ(call.take().status().code(), Code::connection_lost);
  }
  for (const auto& source : sources) EXPECT_TRUE(eventually([&] { return source.expired(); }));
}

TEST_F(ChannelChoice, AnUnknownDeviceFailsTheCallAndNotTheLink) {
  join_both();
  auto message = buffer_message(10'000);
  message.destinations = {{{DeviceType::cuda, 0}}};
  EXPECT_EQ(call_sync(*a, "b", "echo", message).status().code(), Code::channel_unavailable);
  EXPECT_TRUE(echo(10'000).ok());
}

// ---- A user's own channel

TEST_F(ChannelChoice, AUserDefinedChannelIsProbedAndThenCarries) {
  for (const Ways& ways : {Ways{"ring", ""}, Ways{"tcp", ""}}) {
    join_both([](RawAgentOptions& options) { options.registry = with_mail(); }, {}, ways);
    ASSERT_EQ(usable_soon("mail"), "usable");
    EXPECT_EQ(a->explain("b")->channel, "mail");
    std::uint64_t total = 0;
    for (const std::size_t bytes : {5'000UL, 29'999UL, 30'000UL, 30'001UL, 1'000'000UL}) {
      ASSERT_TRUE(echo(bytes).ok());
      total += bytes;
    }
    EXPECT_EQ(sent_by("mail"), total);
    EXPECT_TRUE(eventually([&] { return a->counters().bytes_received["mail"] != 0; })) << "replies go by it as well";
    a->leave();
    b->leave();
  }
}

TEST_F(ChannelChoice, AReplyAcknowledgesBuffersOfAChannelThatNeedsProgress) {
  join_both([](RawAgentOptions& options) {
    options.registry = with_mail({.consumes_on_progress = true});
    options.max_bytes_in_flight = 100'000;  // each call waits for the call before it
  });
  ASSERT_EQ(usable_soon("mail"), "usable");
  for (int i = 0; i < 20; ++i) {
    auto message = buffer_message(100'000);
    const std::weak_ptr<void> source = message.buffers[0].owner;
    RawCallOptions options;
    options.timeout = seconds(10);
    const auto reply = call_sync(*a, "b", "echo", std::move(message), options);
    ASSERT_TRUE(reply.ok()) << reply.status().text();
    EXPECT_TRUE(eventually([&] { return source.expired(); }));
  }
}

TEST_F(ChannelChoice, AUserDefinedChannelLandsInTheCallersMemory) {
  join_both([](RawAgentOptions& options) { options.registry = with_mail(); });
  ASSERT_EQ(usable_soon("mail"), "usable");
  for (int i = 0; i < 20; ++i) {
    auto message = buffer_message(100'000, static_cast<unsigned>(i));
    RawCallOptions options;
    options.into = {patterned(100'000, 99)};
    ASSERT_TRUE(call_sync(*a, "b", "echo", message, options).ok());
    EXPECT_TRUE(same_bytes(options.into[0], message.buffers[0]));
  }
}

TEST_F(ChannelChoice, ManyThreadsShareAUserDefinedChannel) {
  join_both([](RawAgentOptions& options) { options.registry = with_mail({.refuses_every_second = true}); });
  ASSERT_EQ(usable_soon("mail"), "usable");
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (unsigned i = 0; i < 25; ++i) {
        const auto message = buffer_message(40'000, t * 1000 + i);
        const auto reply = call_sync(*a, "b", "echo", message);
        if (!reply.ok() || !same_bytes(reply->buffers.at(0), message.buffers[0])) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(ChannelChoice, ARefusedBufferTakesTheNextChannelWithOneWarning) {
  log_rate::forget();
  ::testing::internal::CaptureStderr();
  join_both([](RawAgentOptions& options) { options.registry = with_mail({.refuses_every_second = true}); });
  ASSERT_EQ(usable_soon("mail"), "usable");
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(echo(10'000).ok());
  EXPECT_EQ(sent_by("mail"), 100'000U);
  EXPECT_EQ(sent_by("xth"), 100'000U);
  a->leave();
  b->leave();
  const auto log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(lines_with(log, "peer=b channel=xth fallback"), 1U) << log;
  EXPECT_THAT(log, HasSubstr("mail: no stamp for letter"));
}

TEST_F(ChannelChoice, OtherChannelsCarryWithoutAWarningDuringAProbe) {
  log_rate::forget();
  ::testing::internal::CaptureStderr();
  join_both([](RawAgentOptions& options) { options.registry = with_mail({.asked = [](const auto&) {}}); });
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(echo(10'000).ok());
  EXPECT_EQ(sent_by("xth"), 50'000U);
  EXPECT_THAT(reason_of(*a->explain("b"), "mail"), HasSubstr("its probe is under way"));
  a->leave();
  b->leave();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("fallback")));
}

TEST_F(ChannelChoice, AProbeThatFailsAtEitherEndRemovesTheChannel) {
  const auto good = [](RawAgentOptions& options) { options.registry = with_mail(); };
  const auto bad = [](RawAgentOptions& options) {
    options.registry = with_mail({.probe = {Code::permission_denied, "the box is locked"}});
  };
  join_both(good, bad);
  std::string reason;
  EXPECT_TRUE(eventually([&] {
    return (reason = reason_of(*a->explain("b"), "mail")).find("at the peer: the box is locked") == 0;
  })) << reason;
  EXPECT_TRUE(echo(10'000).ok());
  EXPECT_EQ(sent_by("mail"), 0U);
  a->leave();
  b->leave();
  join_both(bad, good);
  EXPECT_TRUE(eventually([&] { return (reason = reason_of(*a->explain("b"), "mail")) == "the box is locked"; }))
      << reason;
}

TEST_F(ChannelChoice, EachDirectionFollowsTheChannelOrderOfItsSender) {
  const auto basic_first = [](RawAgentOptions& options) {
    options.registry = with_mail();
    options.channels = "basic,mail,xth";
  };
  join_both([](RawAgentOptions& options) { options.registry = with_mail(); }, basic_first);
  ASSERT_EQ(usable_soon("mail"), "usable");
  ASSERT_TRUE(echo(50'000).ok());
  EXPECT_EQ(sent_by("mail"), 50'000U);
  EXPECT_EQ(a->counters().bytes_received["basic"], 50'000U);
}

// ---- Overrides

TEST_F(ChannelChoice, OptionOverridesEnvironmentOverridesDefault) {
  ::setenv("TENSORFERRY_CHANNELS", "basic", 1);
  join_both();
  EXPECT_EQ(a->explain("b")->channel, "basic");
  a->leave();
  b->leave();
  join_both([](RawAgentOptions& options) { options.channels = "-basic"; });
  EXPECT_EQ(a->explain("b")->channel, "xth");
  a->leave();
  b->leave();
  ::setenv("TENSORFERRY_CHANNELS", "pigeon", 1);
  RawAgentOptions options;
  options.name = "c";
  options.store = store;
  const auto refused = RawAgent::join(options);
  EXPECT_EQ(refused.status().code(), Code::invalid_argument);
  EXPECT_THAT(what(refused.status()), HasSubstr("there is no channel \"pigeon\"; known are: xth, "));
  ::unsetenv("TENSORFERRY_CHANNELS");
}

}  // namespace
}  // namespace tensorferry
