/// Tests of two connected queue pairs (channels/rdma/queue_pair.h), on different cards if there are two, and of how the
/// threads that serve them end: on emulated cards, or on real verbs (make test-rdma).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/background.h"
#include "channels/rdma/local_cards.h"
#include "channels/rdma/peer_connection.h"
#include "channels/rdma/queue_pair.h"
#include "channels/rdma/shared_cards.h"
#include "tests/conformance/outcome.h"

namespace tensorferry::rdma {
namespace {

using conformance::Outcome;
using ::testing::HasSubstr;

constexpr std::size_t kilobyte = 1 << 10;

template <class T>
T made(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().text());
  return *std::move(result);
}

/// A queue pair, its card, and registered memory.
struct End {
  End(const CardPort& port, const Options& options)
      : cards(made(LocalCards::open({port}, options, 64 * kilobyte))),
        pair(made(QueuePair::make(cards->cards.front(), port, options,
                                  [this, told = failed.completion()](const Status& why) mutable {
                                    if (on_failure) on_failure();
                                    told(why);
                                  }))),
        registration(made(cards->registrations->make(memory.data(), memory.size(), Access::lands, {0}))),
        offered(made(cards->registrations->make(memory.data(), memory.size(), Access::offered, {0}))) {
    EXPECT_TRUE(cards->completions->add(pair).ok());
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  ~End() {
    pair->fail({});
    cards->end();
  }
  void leave() {
    pair->fail({});
    cards->completions->retire(pair);
  }

  std::vector<std::byte> memory = std::vector<std::byte>(64 * kilobyte);
  Outcome failed;
  std::function<void()> on_failure;
  std::shared_ptr<LocalCards> cards;
  std::shared_ptr<QueuePair> pair;
  std::shared_ptr<Registration> registration, offered;
};

class RdmaQueuePair : public testing::Test {
 protected:
  void SetUp() override {
    const auto found = usable_ports(Options());
    if (const auto* const refusal = std::get_if<Refusal>(&found)) GTEST_SKIP() << refusal->reason;
    const auto& ports = std::get<0>(found);
    Options options;
    options.timeout = 15;  // 0.13 s
    near = std::make_unique<End>(ports.front(), options);
    far = std::make_unique<End>(ports.back(), options);
    ASSERT_TRUE(near->pair->connect(far->pair->address()).ok());
    ASSERT_TRUE(far->pair->connect(near->pair->address()).ok());
  }
  /// Reads all of the far end's memory.
  Outcome read(std::uint32_t remote_key) const {
    Outcome outcome;
    near->pair->read({.to = near->memory.data(),
                      .local_key = near->registration->keys(0).local,
                      .from = reinterpret_cast<std::uintptr_t>(far->memory.data()),
                      .remote_key = remote_key,
                      .bytes = static_cast<std::uint32_t>(far->memory.size())},
                     outcome.completion());
    return outcome;
  }
  [[nodiscard]] std::uint32_t key() const { return far->offered->keys(0).remote; }

  std::unique_ptr<End> near, far;
};

TEST_F(RdmaQueuePair, ReadsThePeersMemory) {
  std::fill(far->memory.begin(), far->memory.end(), std::byte{7});
  EXPECT_EQ(read(key()).wait_name(), "Ok");
  EXPECT_EQ(near->memory, far->memory);
  EXPECT_FALSE(near->pair->failed());
  EXPECT_FALSE(far->pair->failed());
}

TEST_F(RdmaQueuePair, DoesAListInOrderAlsoIfItIsLongerThanItsQueue) {
  constexpr std::size_t piece = 16, pieces = 64 * kilobyte / piece;
  for (std::size_t i = 0; i < far->memory.size(); ++i) far->memory[i] = static_cast<std::byte>(i / piece * 7);
  std::vector<QueuePair::Step> steps;
  for (std::size_t i = 0; i < pieces; ++i) {  // back to front
    steps.push_back({{.to = near->memory.data() + i * piece,
                      .local_key = near->registration->keys(0).local,
                      .from = reinterpret_cast<std::uintptr_t>(far->memory.data()) + (pieces - 1 - i) * piece,
                      .remote_key = key(),
                      .bytes = piece},
                     false,
                     i + 1 == pieces});
  }
  Outcome outcome;
  near->pair->run(std::move(steps), outcome.completion());
  EXPECT_EQ(outcome.wait_name(), "Ok");
  for (std::size_t i = 0; i < pieces; ++i) {
    ASSERT_EQ(near->memory[i * piece], far->memory[(pieces - 1 - i) * piece]) << i;
  }
  EXPECT_EQ(near->pair->outstanding(), 0U);
  Outcome nothing;
  near->pair->run({}, nothing.completion());
  EXPECT_EQ(nothing.wait_name(), "Ok");
}

TEST_F(RdmaQueuePair, AListEndsOnceIfThePeersCardRefusesAStep) {
  std::vector<QueuePair::Step> steps(3000);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    steps[i].place = {.to = near->memory.data(),
                      .local_key = near->registration->keys(0).local,
                      .from = reinterpret_cast<std::uintptr_t>(far->memory.data()),
                      .remote_key = i == 1500 ? key() + 1 : key(),
                      .bytes = 8};
  }
  Outcome outcome, behind;
  near->pair->run(steps, outcome.completion());
  near->pair->run(std::move(steps), behind.completion());
  EXPECT_EQ(outcome.wait_name(), "ChannelUnavailable");
  EXPECT_EQ(behind.wait_name(), "ChannelUnavailable");
  EXPECT_TRUE(near->pair->failed());
  EXPECT_EQ(read(key()).wait_name(), "ChannelUnavailable");
}

// The last reference to an agent may be that of a completion.
TEST_F(RdmaQueuePair, ACompletionMayEndTheThreadOnWhichItRuns) {
  Outcome outcome;
  const std::weak_ptr<CompletionThread> thread = near->cards->completions;
  near->pair->read({.to = near->memory.data(),
                    .local_key = near->registration->keys(0).local,
                    .from = reinterpret_cast<std::uintptr_t>(far->memory.data()),
                    .remote_key = key(),
                    .bytes = static_cast<std::uint32_t>(far->memory.size())},
                   [this, completed = outcome.completion()](const Status& status) mutable {
                     near->cards->end();
                     completed(status);
                   });
  EXPECT_EQ(outcome.wait_name(), "Ok");
  EXPECT_FALSE(near->cards->completions->add(near->pair).ok());
  near->cards->completions.reset();
  for (int i = 0; i < 10'000 && !thread.expired(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(thread.expired()) << "the thread has ended, and has destroyed the queue pair";
  near->cards->completions = std::make_shared<CompletionThread>(near->cards->cards);  // for the end of the test
}

TEST_F(RdmaQueuePair, CardsThatAreBeingOpenedWhenTheDriversEndTakeNoQueuePairLater) {
  auto shared = std::make_unique<SharedCards>();
  std::promise<void> begun;
  std::shared_ptr<LocalCards> opened;
  shared->connecting().submit([&, &cards = *shared] {
    begun.set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the drivers end meanwhile
    opened = made(cards.open());
  });
  begun.get_future().wait();
  shared.reset();
  ASSERT_NE(opened, nullptr) << "the end waits for the job";
  EXPECT_EQ(opened->completions->add(near->pair).code(), Code::agent_closed);
}

TEST_F(RdmaQueuePair, AClosedConnectionSubmitsNoJobToAThreadThatMayHaveEnded) {
  auto background = std::make_unique<Background>();
  const auto connection = std::make_shared<PeerConnection>(*background, PeerConnection::Listener());
  connection->close();
  background.reset();
  connection->begin([] { return Result<std::shared_ptr<LocalCards>>(Status(Code::internal, "opened")); });
  EXPECT_EQ(connection->lanes(), nullptr);
}

TEST_F(RdmaQueuePair, TheEndWhoseCardRefusedAReadLearnsItToo) {
  const auto refused = read(key() ^ 0x5a5a);
  EXPECT_THAT(std::string(refused.wait()->what()), HasSubstr("access"));
  EXPECT_EQ(near->failed.wait_name(), "ChannelUnavailable");
  EXPECT_EQ(far->failed.wait_name(), "ChannelUnavailable") << "its queue pair answers nothing any more";
}

TEST_F(RdmaQueuePair, AFailureThatTheCardReportsMayEndTheThreadAndDestroyTheQueuePair) {
  far->on_failure = [this] {
    far->cards->end();
    far->leave();
  };
  (void)read(key() ^ 0x5a5a);
  EXPECT_EQ(far->failed.wait_name(), "ChannelUnavailable");
}

TEST_F(RdmaQueuePair, AReadFromAPeerThatDoesNotAnswerFailsAfterAFewRepeats) {
  far->leave();
  const auto failed = read(key());
  EXPECT_THAT(std::string(failed.wait()->what()), HasSubstr("retry"));
  EXPECT_EQ(near->failed.wait_name(), "ChannelUnavailable");
}

}  // namespace
}  // namespace tensorferry::rdma
