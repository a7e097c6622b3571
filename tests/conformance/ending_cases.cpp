/// Cases in which a link, a peer or a ticket ends. Each operation completes once, and nothing hangs.
#include <atomic>
#include <future>
#include <random>
#include <thread>
#include <vector>

#include "tests/conformance/channel_suite.h"

namespace tensorferry::conformance {

namespace {

constexpr std::size_t kilobyte = 1 << 10;
constexpr std::size_t megabyte = 1 << 20;

/// The point of the transfer at which an end dies.
enum class Step { offer_made, ticket_delivered, while_pulling, bytes_half_there, before_acknowledgement };
constexpr Step steps[] = {Step::offer_made, Step::ticket_delivered, Step::while_pulling, Step::bytes_half_there,
                          Step::before_acknowledgement};

/// Runs one transfer from `a` to `b`, closes one of the two ends at `step`, and collects the outcomes that must
/// complete.
class Killing {
 public:
  Killing(WireEnd& a, WireEnd& b, bool sender_dies, Step step)
      : a_(a), b_(b), dying_(sender_dies ? a : b), step_(step) {}

  void run(std::size_t bytes) {
    std::promise<void> killed;
    auto over = killed.get_future().share();
    b_.behave({.on_message =
                   [this, over](Arrivals& arrivals) {
                     if (step_ == Step::ticket_delivered) meet(over);
                     for (auto& arrival : arrivals) {
                       if (step_ == Step::while_pulling) {
                         arrival->may_adopt = false;
                         arrival->on_reserve = [this, over] { meet(over); };
                       }
                       {
                         std::lock_guard lock(mutex_);
                         pulled_.push_back(arrival);
                       }
                       b_.pull(arrival);
                     }
                   },
               .acknowledges = step_ != Step::before_acknowledgement});
    if (step_ == Step::bytes_half_there) {
      b_.messages().hold_after(bytes / 2);
      b_.bulk().hold_after(bytes / 2);
    }
    Letter letter(a_);
    if (letter.offer(a_.memory().filled(bytes, 1))) released_ = letter.released;
    if (step_ != Step::offer_made) {
      letter.send();
      wait_for_step();
    }
    kill();
    killed.set_value();
    if (step_ == Step::offer_made) letter.send();  // as a sender does that has not noticed the end yet
  }

  std::vector<Outcome> outcomes() {
    std::lock_guard lock(mutex_);
    auto all = released_;
    for (const auto& arrival : pulled_) all.insert(all.end(), {arrival->landed, arrival->consumed});
    return all;
  }

 private:
  void meet(const std::shared_future<void>& over) {
    reached_ = true;
    over.wait();
  }

  void wait_for_step() {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (std::chrono::steady_clock::now() < until) {
      if (reached_) return;
      std::lock_guard lock(mutex_);
      const bool landed = !pulled_.empty() && pulled_.front()->landed.runs() > 0;
      if (landed) return;  // a channel that puts no bytes on the wire lands without stopping half way
      if (b_.messages().held() || b_.bulk().held()) return;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  void kill() { dying_.close(Status(Code::agent_closed, "killed by the test")); }

  WireEnd& a_;
  WireEnd& b_;
  WireEnd& dying_;
  const Step step_;
  std::atomic<bool> reached_{false};
  std::mutex mutex_;
  Arrivals pulled_;
  std::vector<Outcome> released_;
};

}  // namespace

TEST_P(ChannelSuite, APeerKilledAtAnyStepCompletesEverythingOnceAtBothEnds) {
  for (const bool sender_dies : {true, false}) {
    for (const auto step : steps) {
      for (const auto bytes : {kilobyte, 4 * megabyte}) {
        SCOPED_TRACE(testing::Message() << (sender_dies ? "sender" : "receiver") << " dies at step "
                                        << static_cast<int>(step) << " of " << bytes << " bytes");
        ASSERT_NO_FATAL_FAILURE(connect());
        Killing killing(a(), b(), sender_dies, step);
        killing.run(bytes);
        for (const auto& outcome : killing.outcomes()) expect_once(outcome, "an operation");
        disconnect();
        for (const auto& outcome : killing.outcomes()) EXPECT_EQ(outcome.runs(), 1);
      }
    }
  }
}

TEST_P(ChannelSuite, CloseDuringTransferCompletesEverythingOnce) {
  for (int round = 0; round < 6; ++round) {
    ASSERT_NO_FATAL_FAILURE(connect());
    std::mutex mutex;
    std::vector<Outcome> outcomes;
    std::atomic<int> landed{0};
    const auto keep = [&](const Outcome& outcome) {
      std::lock_guard lock(mutex);
      outcomes.push_back(outcome);
    };
    for (auto* end : {&a(), &b()}) {
      end->behave({.before_pull =
                       [&](Arrival& arrival) {
                         keep(arrival.landed);
                         keep(arrival.consumed);
                       },
                   .on_landed = [&](Arrival&) { ++landed; }});
    }
    std::vector<std::thread> senders;
    for (int thread = 0; thread < 4; ++thread) {
      senders.emplace_back([&, thread] {
        auto& from = thread % 2 ? a() : b();
        for (std::uint32_t i = 0; i < 100; ++i) {
          Letter letter(from);
          const auto bytes = i % 4 ? kilobyte * i : megabyte;
          const bool offered = letter.offer(from.memory().allocate(bytes));
          if (!offered) return;  // the end has been closed
          letter.send();
          keep(letter.released.front());
        }
      });
    }
    while (landed < 10 * round) std::this_thread::yield();
    (round % 2 ? a() : b()).close(Status(Code::cancelled, "closed by the test"));
    for (auto& sender : senders) sender.join();
    disconnect();
    for (const auto& outcome : outcomes) ASSERT_NO_FATAL_FAILURE(expect_once(outcome, "an operation"));
  }
}

TEST_P(ChannelSuite, AfterTheEndOffersAreRefusedAndPullsFail) {
  Letter letter(a());
  ASSERT_TRUE(letter.offer(memory_a().filled(100, 1))) << letter.refusal;
  const auto ticket = letter.tickets.front();
  for (auto* end : {&a(), &b()}) end->close(Status(Code::connection_lost, "closed by the test"));
  letter.drop();
  for (auto* end : {&a(), &b()}) end->finish();  // an end may still be closing because the other one closed
  for (auto* end : {&a(), &b()}) {
    Letter late(*end);
    Outcome dropped;
    EXPECT_FALSE(late.offer(end->memory().filled(100, 1), dropped.completion()));
    EXPECT_FALSE(late.refusal.empty());
    EXPECT_EQ(dropped.runs(), 0);
    const auto arrival = std::make_shared<Arrival>(ticket, Arrival::Number{1, 0}, end->memory());
    end->pull(arrival);
    EXPECT_EQ(arrival->landed.wait_name(), "ConnectionLost");
    expect_once(arrival->consumed, "consumed");
    end->channel().discard(ticket);
    end->channel().withdraw(ticket);
    end->channel().acknowledged(ticket);
    end->channel().control(Bytes(3), {});
    end->channel().close(Status(Code::internal, "again"));
  }
  expect_once(letter.released.front(), "released");
}

TEST_P(ChannelSuite, HalfClosedIsClosed) {
  std::vector<Outcome> released;
  for (int i = 0; i < 10; ++i) released.push_back(a().send(memory_a().filled(300 * kilobyte, 1)));
  a().messages().end_writing();
  for (const auto& outcome : released) expect_once(outcome, "released");
  const bool refused = becomes_true([&] {
    Letter letter(a());
    return !letter.offer(memory_a().filled(10, 1));
  });
  EXPECT_TRUE(refused) << "the end that was cut off never heard of it";
}

TEST_P(ChannelSuite, AnEndThatClosesBeforeItIsReadyCompletesEverything) {
  auto [mine, theirs] = connected_sockets();
  WireEnd lonely("nobody", driver_a(), GetParam().devices, memory_a(), std::move(mine));
  Letter letter(lonely);
  const bool offered = letter.offer(memory_a().filled(1000, 1));
  if (offered) letter.send();
  lonely.close(Status(Code::connection_lost, "nobody came"));
  lonely.start();  // the lanes' threads find the sockets ended, and complete the queued parts
  lonely.finish();
  if (offered) expect_once(letter.released.front(), "released");
}

TEST_P(ChannelSuite, DiscardedTicketsAreReleasedWithoutHarmToOthers) {
  b().behave({.on_message = [this](Arrivals& arrivals) {
    for (auto& arrival : arrivals) arrival->number.index % 2 ? b().discard(arrival) : b().pull(arrival);
  }});
  for (const auto bytes : {kilobyte, 2 * megabyte}) {
    Letter letter(a());
    for (std::uint32_t i = 0; i < 6; ++i) ASSERT_TRUE(letter.offer(memory_a().filled(bytes, i))) << letter.refusal;
    letter.send();
    for (const auto& released : letter.released) EXPECT_EQ(released.wait_name(), "Ok");
  }
  b().behave({});
  // No receive() here: the discarded arrivals before this message would never complete.
  const auto released = a().send(memory_a().filled(777, 9));
  EXPECT_EQ(released.wait_name(), "Ok");
}

TEST_P(ChannelSuite, WithdrawnTicketsAreReleasedWithoutHarmToOthers) {
  for (const auto bytes : {std::size_t{0}, std::size_t{1}, 100 * kilobyte, 2 * megabyte}) {
    for (const bool appends : {true, false}) {
      Letter letter(a(), appends);
      for (std::uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(letter.offer(memory_a().filled(bytes, i))) << letter.refusal;
      letter.drop();
      for (const auto& released : letter.released) expect_once(released, "released");
      expect_carries(a(), b(), bytes, 4);
    }
  }
}

TEST_P(ChannelSuite, TruncatedTicketsAreProtocolErrors) {
  for (const auto bytes : {kilobyte, megabyte}) {
    std::size_t length = 1;
    for (std::size_t kept = 0; kept < length; ++kept) {
      ASSERT_NO_FATAL_FAILURE(connect());
      Letter letter(a());
      ASSERT_TRUE(letter.offer(memory_a().filled(bytes, 1))) << letter.refusal;
      length = letter.tickets.front().opaque.size();
      letter.tickets.front().opaque.resize(kept);
      letter.send();
      const auto arrivals = b().receive();
      ASSERT_EQ(arrivals.size(), 1u) << kept << " of " << length;
      EXPECT_EQ(arrivals.front()->landed.wait_name(), "ProtocolError") << kept << " of " << length;
      EXPECT_EQ(arrivals.front()->filled, 0);
      disconnect();
      EXPECT_EQ(arrivals.front()->landed.runs(), 1);
      EXPECT_EQ(arrivals.front()->consumed.runs(), 1);
      expect_once(letter.released.front(), "released");
    }
  }
}

TEST_P(ChannelSuite, GarbageTicketsCompleteOnceWithoutHarm) {
  std::mt19937 random(3);
  for (int round = 0; round < 120; ++round) {
    ASSERT_NO_FATAL_FAILURE(connect());
    Letter letter(a());
    ASSERT_TRUE(letter.offer(memory_a().filled(round % 2 ? kilobyte : megabyte, 1))) << letter.refusal;
    auto& ticket = letter.tickets.front();
    switch (round % 6) {
      case 0:
      case 1:
        ticket.opaque[random() % ticket.opaque.size()] ^= std::byte(1U << random() % 8);
        break;
      case 2:
        ticket.opaque.resize(random() % (Ticket::max_bytes + 1));
        for (auto& byte : ticket.opaque) byte = std::byte(random());
        break;
      case 3:
        ticket.opaque.push_back(std::byte(random()));
        break;
      case 4:
        ticket.bytes =
            std::vector<std::uint64_t>{0, 1, ticket.bytes - 1, ticket.bytes + 1, 1ULL << 63, ~0ULL}[random() % 6];
        break;
      default:
        letter.tickets.push_back(ticket);  // the receiver pulls it twice
        break;
    }
    std::mutex mutex;
    std::vector<Outcome> outcomes{letter.released};
    b().behave({.before_pull = [&](Arrival& arrival) {
      std::lock_guard lock(mutex);
      outcomes.insert(outcomes.end(), {arrival.landed, arrival.consumed});
    }});
    letter.send();
    // A changed ticket may name bytes that never come. Its pull ends with the link, or in an agent with the call's
    // deadline.
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    disconnect();
    for (const auto& outcome : outcomes) ASSERT_NO_FATAL_FAILURE(expect_once(outcome, "an operation")) << round;
  }
}

TEST_P(ChannelSuite, GarbageControlMessagesAndDescriptorsDoNoHarm) {
  std::mt19937 random(4);
  const auto devices = GetParam().devices;
  const auto mine = driver_a().descriptor(devices.local);
  for (int round = 0; round < 500; ++round) {
    Bytes garbage(random() % 80);
    for (auto& byte : garbage) byte = std::byte(random());
    b().channel().control(garbage, {});
    (void)driver_a().reaches(std::get<Bytes>(mine), garbage);
  }
  const auto released = a().send(memory_a().filled(100, 1));
  disconnect();
  EXPECT_EQ(released.runs(), 1);
}

namespace {
/// Calls every function of a channel that a completion may call.
void use(WireEnd& end, const Ticket& ticket) {
  Letter letter(end);
  (void)letter.offer(end.memory().filled(0, 1));
  (void)letter.offer(end.memory().filled(100, 1));
  letter.drop();
  end.channel().acknowledged(ticket);
  end.channel().discard(Ticket{});
}
}  // namespace

TEST_P(ChannelSuite, CompletionsRunUnderNoLock) {
  std::atomic<int> held{0}, ran{0};
  const auto look = [&](WireEnd& end, const Ticket& ticket) {
    ++ran;
    if (!returns_elsewhere([&end, ticket] { use(end, ticket); })) ++held;
    use(end, ticket);  // also on the completing thread
  };
  b().behave({.on_landed = [&](Arrival& arrival) { look(b(), Ticket{.bytes = arrival.ticket.bytes, .opaque = {}}); }});
  for (std::size_t bytes : {std::size_t{0}, kilobyte, megabyte}) {
    const auto released = a().send(memory_a().filled(bytes, 1), [&](Status) { look(a(), Ticket{}); });
    expect_arrives(b(), bytes, 1);
    expect_once(released, "released");
  }
  // Completions that run because the link ends.
  b().messages().hold_after(0);
  b().bulk().hold_after(0);
  std::vector<Outcome> released;
  for (int i = 0; i < 5; ++i) {
    released.push_back(a().send(memory_a().filled(megabyte, 1), [&](Status) { look(a(), Ticket{}); }));
  }
  a().close(Status(Code::cancelled, "closed by the test"));
  for (const auto& outcome : released) expect_once(outcome, "released");
  disconnect();
  EXPECT_EQ(held, 0) << "a completion ran under a lock";
  EXPECT_GE(ran, 11);
}

TEST_P(ChannelSuite, ClosingFromACompletionWorks) {
  for (std::size_t bytes : {std::size_t{0}, kilobyte, megabyte}) {
    ASSERT_NO_FATAL_FAILURE(connect());
    const auto released =
        a().send(memory_a().filled(bytes, 1), [&](Status) { a().close(Status(Code::cancelled, "by a completion")); });
    expect_once(released, "released");
    disconnect();
    EXPECT_EQ(released.runs(), 1);
  }
}

namespace {

/// A chain of operations. Each starts the next one when it completes.
class Chain {
 public:
  explicit Chain(int length) : left_(length) {}

  template <class Start>
  void next(Start&& start) {
    thread_local int nesting = 0;
    ++nesting;
    deepest_ = std::max(deepest_.load(), nesting);
    if (left_.fetch_sub(1) > 0) {
      start();
    } else {
      done_.set_value();
    }
    --nesting;
  }
  /// Returns whether the chain ends. It may take its time, but if `patience` passes without an operation, it does not
  /// end.
  bool wait() {
    const auto done = done_.get_future();
    for (int before = left_; done.wait_for(patience) != std::future_status::ready; before = left_) {
      if (left_ == before) return false;
    }
    return true;
  }
  [[nodiscard]] int deepest() const { return deepest_; }

 private:
  std::atomic<int> left_;
  std::atomic<int> deepest_{0};
  std::promise<void> done_;
};

constexpr int deep_enough = 100;  // how many operations may nest inside each other's completions on one thread

}  // namespace

TEST_P(ChannelSuite, TenThousandOffersChainedByTheirReleasesUseABoundedStack) {
  for (const std::size_t bytes : {0, 100}) {
    Chain chain(10'000);
    const auto memory = memory_a().filled(bytes, 1);
    b().behave({});
    std::function<void()> start = [&] { a().send(memory, [&](Status) { chain.next(start); }); };
    chain.next(start);
    ASSERT_TRUE(chain.wait());
    EXPECT_LE(chain.deepest(), deep_enough);
  }
}

TEST_P(ChannelSuite, TenThousandPullsChainedByTheirCompletionsUseABoundedStack) {
  constexpr int count = 10'000;
  Chain chain(count);
  auto all = std::make_shared<Arrivals>();
  std::atomic<std::size_t> index{0};
  std::function<void()> start = [&] { b().pull((*all)[index++]); };
  b().behave({.on_message =
                  [&](Arrivals& arrivals) {
                    *all = arrivals;
                    chain.next(start);
                  },
              .on_landed = [&](Arrival&) { chain.next(start); }});
  Letter letter(a());
  for (int i = 0; i < count; ++i) ASSERT_TRUE(letter.offer(memory_a().filled(0, 1))) << letter.refusal;
  letter.send();
  ASSERT_TRUE(chain.wait());
  EXPECT_LE(chain.deepest(), deep_enough);
  for (const auto& outcome : letter.released) expect_once(outcome, "released");
}

}  // namespace tensorferry::conformance
