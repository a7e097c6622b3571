// The pool alone: which threads read and run, the number of threads, and the end of a pool.
#include "agent/pool/pool.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <future>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "agent/agent.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;

/// A gate that opens once, for all waiting threads.
class Gate {
 public:
  void open() { open_ = true; }
  void wait() const {
    while (!open_) std::this_thread::sleep_for(milliseconds(1));
  }

 private:
  std::atomic<bool> open_{false};
};

/// A pool, with the reactor's tick if a test asks for it.
class Pools : public ::testing::Test {
 protected:
  ~Pools() override { finish(); }
  /// Ends the pool. A test calls it before the objects that its jobs use go out of scope.
  void finish() {
    ticking_ = false;
    if (ticker_.joinable()) ticker_.join();
    if (pool) pool->stop(seconds(10));
  }
  void start(Pool::Limits limits = {}, std::shared_ptr<Executor> executor = nullptr, bool ticking = true) {
    pool = std::make_shared<Pool>(limits, std::move(executor), [] {});
    pool->start();
    if (!ticking) return;
    ticker_ = std::thread([this] {
      while (ticking_) {
        pool->tick();
        std::this_thread::sleep_for(milliseconds(1));
      }
    });
  }
  /// Submits this many handlers, which all wait at `gate`.
  void occupy(int handlers, Gate& gate) {
    for (int i = 0; i < handlers; ++i) {
      pool->submit_handler([&] {
        ++inside_;
        gate.wait();
      });
    }
    ASSERT_TRUE(eventually([&] { return inside_ == handlers; }));
  }
  std::shared_ptr<Pool> pool;

 private:
  std::atomic<int> inside_{0};
  std::atomic<bool> ticking_{true};
  std::thread ticker_;
};

/// A readable descriptor: after each write the pool runs `on_read` once.
class Doorbell final : public Readable {
 public:
  explicit Doorbell(std::function<void()> on_read) : on_read_(std::move(on_read)) {}
  void on_readable() override {
    std::uint64_t count = 0;
    if (::read(fd.get(), &count, sizeof count) != sizeof count) return;
    for (; count > 0; --count) on_read_();
  }
  void ring() const {
    const std::uint64_t one = 1;
    ASSERT_EQ(::write(fd.get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }
  const FileDescriptor fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};

 private:
  const std::function<void()> on_read_;
};

/// A ring whose requests count themselves.
class CountingRing final : public RequestSource {
 public:
  explicit CountingRing(Pool& pool) : pool_(pool) {}
  void put() {
    ++waiting_;
    pool_.doorbell().ring();
  }
  [[nodiscard]] bool empty() const override { return waiting_ == 0; }
  [[nodiscard]] bool needs_executor() override { return false; }
  bool serve_one() override {
    auto seen = waiting_.load();
    while (seen != 0 && !waiting_.compare_exchange_weak(seen, seen - 1)) {
    }
    if (seen != 0) ++served;
    return seen != 0;
  }
  std::atomic<int> served{0};

 private:
  Pool& pool_;
  std::atomic<int> waiting_{0};
};

/// An executor with one global lock, like a language runtime. Counts its calls.
class CountingExecutor final : public Executor {
 public:
  void* attach() override {
    ++attached;
    return new int(0);
  }
  void enter(void* thread) override {
    lock_.lock();
    ++entered;
    holder = thread;
  }
  void leave(void* thread) override {
    EXPECT_EQ(holder, thread);
    holder = nullptr;
    lock_.unlock();
  }
  void detach(void* thread) override {
    EXPECT_NE(holder, thread);
    delete static_cast<int*>(thread);
    ++detached;
  }
  /// Runs `wait` without the lock, as a handler does that releases the lock while it waits.
  void while_outside(const std::function<void()>& wait) {
    void* const thread = holder.exchange(nullptr);
    lock_.unlock();
    wait();
    lock_.lock();
    holder = thread;
  }
  std::atomic<int> attached{0}, entered{0}, detached{0};
  std::atomic<void*> holder{nullptr};

 private:
  std::mutex lock_;
};

// ---- Reading

TEST_F(Pools, AReadRequestWakesNoOtherThread) {
  start({}, nullptr, false);
  std::atomic<bool> done{false};
  const auto bell = std::make_shared<Doorbell>([&] { pool->submit_handler([&] { done = true; }); });
  pool->add(bell->fd.get(), bell, Pool::Watch::always);
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(eventually([&] { return pool->doorbell().any_parked(); })) << "one leads, the other sleeps";
    const auto rung = pool->doorbell().ticket();
    done = false;
    bell->ring();
    ASSERT_TRUE(eventually([&] { return done.load(); }));
    EXPECT_FALSE(pool->doorbell().rung_since(rung));
  }
  EXPECT_EQ(pool->threads(), 2);
  pool->remove(bell->fd.get());
}

TEST_F(Pools, AnotherThreadReadsWhileAHandlerRunsLongerThanATick) {
  start();
  Gate gate;
  std::atomic<int> read{0};
  const auto blocking = std::make_shared<Doorbell>([&] { pool->submit_handler([&] { gate.wait(); }); });
  const auto other = std::make_shared<Doorbell>([&] { ++read; });
  pool->add(blocking->fd.get(), blocking, Pool::Watch::always);
  pool->add(other->fd.get(), other, Pool::Watch::always);
  for (int blocked = 1; blocked <= 20; ++blocked) {
    blocking->ring();
    std::this_thread::sleep_for(milliseconds(2));
    other->ring();
    ASSERT_TRUE(eventually([&] { return read == blocked; })) << blocked;
  }
  gate.open();
  finish();
}

TEST_F(Pools, AHandlerThatDeclaresBlockingIsReplacedWithoutATick) {
  start({}, nullptr, false);
  Gate gate;
  std::atomic<int> read{0};
  const auto blocking = std::make_shared<Doorbell>([&] {
    pool->submit_handler([&] {
      const WaitInHandler place;
      gate.wait();
    });
  });
  const auto other = std::make_shared<Doorbell>([&] { ++read; });
  pool->add(blocking->fd.get(), blocking, Pool::Watch::always);
  pool->add(other->fd.get(), other, Pool::Watch::always);
  for (int blocked = 1; blocked <= 20; ++blocked) {
    blocking->ring();
    other->ring();
    ASSERT_TRUE(eventually([&] { return read == blocked; })) << blocked;
  }
  gate.open();
  finish();
}

TEST_F(Pools, HandlersThatRunForLongNeedNoTickOnceOtherThreadsWaitForWork) {
  start({.least = 2, .most = 8}, nullptr, false);
  Gate gate;
  std::atomic<int> read{0}, ran{0};
  const auto bell = std::make_shared<Doorbell>([&] { ++read; });
  const auto ring = std::make_shared<CountingRing>(*pool);
  pool->add(bell->fd.get(), bell, Pool::Watch::always);
  pool->add(ring);
  EXPECT_EQ(pool->tick(), Pace::rest);
  std::atomic<int> inside{0};
  for (int i = 0; i < 3; ++i) {
    pool->submit_handler([&] {
      ++inside;
      gate.wait();
    });
  }
  ASSERT_TRUE(eventually([&] {
    pool->tick();  // which may have to start the third thread
    return inside == 3;
  }));
  ASSERT_TRUE(eventually([&] { return pool->tick() == Pace::stroll; }));
  for (int turn = 1; turn <= 100; ++turn) {
    bell->ring();
    ASSERT_TRUE(eventually([&] { return read == turn; })) << turn;
    ring->put();
    ASSERT_TRUE(eventually([&] { return ring->served == turn; })) << turn;
    pool->submit([&] { ++ran; });
    ASSERT_TRUE(eventually([&] { return ran == turn; })) << turn;
  }
  EXPECT_GE(pool->threads(), 5) << "three that run handlers, and two as in an idle pool";
  gate.open();
  ASSERT_TRUE(eventually([&] { return pool->tick() == Pace::rest; }));
  finish();
}

TEST_F(Pools, AReaderThatIsHeldUpStopsOtherReadersUntilTheTickAtMost) {
  start({}, nullptr, false);
  Gate gate;
  std::atomic<int> held{0}, read{0};
  const auto slow = std::make_shared<Doorbell>([&] {
    ++held;
    gate.wait();
  });
  const auto other = std::make_shared<Doorbell>([&] { ++read; });
  pool->add(slow->fd.get(), slow, Pool::Watch::always);
  pool->add(other->fd.get(), other, Pool::Watch::always);
  slow->ring();
  ASSERT_TRUE(eventually([&] { return held == 1; }));
  EXPECT_FALSE(pool->busy()) << "a reader is no job";
  other->ring();
  EXPECT_TRUE(eventually([&] {
    EXPECT_EQ(pool->tick(), Pace::rest);
    return read == 1;
  }));
  gate.open();
  finish();
}

TEST_F(Pools, ABlockingReaderDoesNotStopOtherReaders) {
  start({}, nullptr, false);
  Gate gate;
  std::atomic<int> read{0}, long_reads{0};
  const auto slow = std::make_shared<Doorbell>([&] {
    ++long_reads;
    gate.wait();
  });
  const auto other = std::make_shared<Doorbell>([&] { ++read; });
  pool->add(slow->fd.get(), slow, Pool::Watch::blocking);
  pool->add(other->fd.get(), other, Pool::Watch::always);
  slow->ring();
  ASSERT_TRUE(eventually([&] { return long_reads == 1; }));
  other->ring();
  EXPECT_TRUE(eventually([&] { return read == 1; }));
  gate.open();
  slow->ring();
  other->ring();
  EXPECT_TRUE(eventually([&] { return read == 2; }));
  EXPECT_EQ(long_reads, 1) << "reported once per arm()";
  pool->arm(slow->fd.get());
  EXPECT_TRUE(eventually([&] { return long_reads == 2; }));
  finish();
}

TEST_F(Pools, ADisarmedOrRemovedSourceIsNotReported) {
  start();
  std::atomic<int> read{0}, others{0};
  const auto bell = std::make_shared<Doorbell>([&] { ++read; });
  const auto other = std::make_shared<Doorbell>([&] { ++others; });
  // When the pool has reported the other bell, it has polled the first one too.
  int polls = 0;
  const auto poll = [&] {
    ++polls;
    other->ring();
    EXPECT_TRUE(eventually([&] { return others == polls; }));
  };
  pool->add(bell->fd.get(), bell, Pool::Watch::closing);
  pool->add(other->fd.get(), other, Pool::Watch::always);
  bell->ring();
  poll();
  EXPECT_EQ(read, 0);
  pool->arm(bell->fd.get());
  EXPECT_TRUE(eventually([&] { return read == 1; })) << "arm() reports bytes that arrived before it";
  bell->ring();
  EXPECT_TRUE(eventually([&] { return read == 2; }));
  pool->disarm(bell->fd.get());
  bell->ring();
  poll();
  EXPECT_EQ(read, 2);
  pool->remove(bell->fd.get());
  pool->arm(bell->fd.get());
  poll();
  EXPECT_EQ(read, 2);
  EXPECT_EQ(bell.use_count(), 1) << "not kept after remove()";
}

// ---- Running

TEST_F(Pools, BlockingJobsRunSideBySideAndTheThreadsEndAgain) {
  start({.idle = milliseconds(50)});
  Gate gate;
  ASSERT_NO_FATAL_FAILURE(occupy(60, gate));
  EXPECT_LE(pool->threads(), 60 + 2 + 8) << "one each, the reader, and what a tick may have woken too many";
  gate.open();
  EXPECT_TRUE(eventually([&] { return pool->threads() == 2 && !pool->busy(); }));
  finish();
}

TEST_F(Pools, SurplusThreadsEndDespiteATrickleOfJobs) {
  start({.idle = milliseconds(200)});
  Gate gate;
  ASSERT_NO_FATAL_FAILURE(occupy(30, gate));
  gate.open();
  EXPECT_TRUE(eventually([&] {
    pool->submit_long([] {});  // wakes a thread
    return pool->threads() <= 4;
  })) << pool->threads();
  finish();
}

TEST_F(Pools, ABusyMachineStartsNoMoreThreads) {
  start({.idle = seconds(60)});
  std::atomic<int> done{0};
  for (int i = 0; i < 2000; ++i) {
    pool->submit_handler([&] { ++done; });
    if (i % 100 == 0) std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_TRUE(eventually([&] { return done == 2000; }));
  EXPECT_LE(pool->threads(), 24);
}

TEST_F(Pools, HandlersOfAFractionOfATickRunSideBySide) {
  constexpr int callers = 3;  // on two CPUs or more, as many threads run their handlers
  start({.least = 2, .idle = seconds(60)});
  std::atomic<int> inside{0}, most{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < callers; ++i) {
    threads.emplace_back([&] {
      while (!over) {
        std::promise<void> done;
        pool->submit_handler([&] {
          const int now = ++inside;
          for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
          }
          std::this_thread::sleep_for(std::chrono::microseconds(100));
          --inside;
          done.set_value();
        });
        done.get_future().wait();
      }
    });
  }
  EXPECT_TRUE(eventually([&] { return most == callers; })) << most << " of " << callers << " at once";
  over = true;
  for (auto& thread : threads) thread.join();
  finish();
}

TEST_F(Pools, JobsOfOneThreadStartInTheirOrder) {
  start({.least = 1, .most = 1}, nullptr, false);
  std::vector<int> order;
  std::atomic<int> done{0};
  Gate gate;
  pool->submit([&] { gate.wait(); });
  for (int i = 0; i < 500; ++i) {
    pool->submit([&, i] {
      order.push_back(i);
      ++done;
    });
  }
  gate.open();
  ASSERT_TRUE(eventually([&] { return done == 500; }));
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_F(Pools, HandlersAtTheLimitWaitWhileInternalJobsRun) {
  start({.least = 2, .most = 4});
  Gate gate;
  std::atomic<int> inside{0}, most{0}, done{0}, read{0}, own{0};
  const auto bell = std::make_shared<Doorbell>([&] { ++read; });
  pool->add(bell->fd.get(), bell, Pool::Watch::always);
  const auto handler = [&] {
    most = std::max(most.load(), ++inside);
    gate.wait();
    --inside;
    ++done;
  };
  for (int i = 0; i < 4; ++i) pool->submit_handler(handler);
  ASSERT_TRUE(eventually([&] { return inside == 4; }));
  for (int i = 0; i < 4; ++i) pool->submit_handler(handler);
  bell->ring();
  EXPECT_TRUE(eventually([&] { return read == 1; })) << "requests are still read";
  pool->submit([&] { ++own; });
  pool->submit_long([&] { ++own; });
  EXPECT_TRUE(eventually([&] { return own == 2; })) << "completions and dials do not wait for handlers";
  EXPECT_TRUE(pool->caught_up());
  gate.open();
  EXPECT_TRUE(eventually([&] { return done == 8; }));
  EXPECT_EQ(most, 4);
  finish();
}

TEST_F(Pools, AHandlerThatWaitsForAPeerLeavesItsPlaceToOthers) {
  start({.least = 2, .most = 2});
  Gate gate;
  std::atomic<int> waiting{0}, done{0};
  for (int i = 0; i < 8; ++i) {
    pool->submit_handler([&] {
      {
        const WaitInHandler outer;
        const WaitInHandler inner;  // a wait inside the wait, by a completion that the waiting thread runs
        ++waiting;
        gate.wait();
      }
      ++done;
    });
  }
  EXPECT_TRUE(eventually([&] { return waiting == 8; })) << waiting << " of 8 wait at once";
  pool->submit_handler([&] { ++done; });
  EXPECT_TRUE(eventually([&] { return done == 1; })) << "both places are free";
  gate.open();
  EXPECT_TRUE(eventually([&] { return done == 9; }));
  finish();
}

TEST_F(Pools, HandlersThatHaveWaitedCountAgain) {
  start({.least = 2, .most = 2});
  Gate after_wait, end;
  std::atomic<int> running{0}, others{0};
  std::atomic<bool> ending{false};
  for (int i = 0; i < 2; ++i) {
    pool->submit_handler([&] {
      {
        const WaitInHandler place;
        after_wait.wait();
      }
      ++running;
      end.wait();
    });
  }
  after_wait.open();
  ASSERT_TRUE(eventually([&] { return running == 2; }));
  pool->submit_handler([&] {
    EXPECT_TRUE(ending) << "both places are taken again";
    ++others;
  });
  ending = true;
  end.open();
  EXPECT_TRUE(eventually([&] { return others == 1; }));
  finish();
}

TEST_F(Pools, JobsThatWaitForStoppedPeersDoNotUseUpTheThreads) {
  start({.least = 2, .most = 2});
  Gate gate;
  std::atomic<int> stuck{0}, done{0};
  for (int i = 0; i < 40; ++i) {
    pool->submit_long([&] {
      ++stuck;
      gate.wait();
    });
  }
  EXPECT_TRUE(eventually([&] { return stuck == 40; })) << stuck << " of 40 run";
  pool->submit_handler([&] { ++done; });
  EXPECT_TRUE(eventually([&] { return done == 1; }));
  gate.open();
  finish();
}

TEST_F(Pools, WaitingHandlersOfManySendersStartInTurn) {
  start({.least = 2, .most = 1});  // one handler at a time, so `order` is the order in which they start
  Gate gate;
  ASSERT_NO_FATAL_FAILURE(occupy(1, gate));
  std::mutex mutex;
  std::vector<int> order;
  const int senders[3] = {};
  const auto submit = [&](int sender) {
    pool->submit_handler(
        [&, sender] {
          const std::lock_guard lock(mutex);
          order.push_back(sender);
        },
        false, &senders[sender]);
  };
  for (int i = 0; i < 1000; ++i) submit(0);
  submit(1);
  submit(2);
  gate.open();
  ASSERT_TRUE(eventually([&] {
    const std::lock_guard lock(mutex);
    return order.size() == 1002;
  }));
  for (const int small : {1, 2}) {
    const auto place = std::find(order.begin(), order.end(), small) - order.begin();
    EXPECT_LE(place, 3) << "sender " << small << " does not wait for the thousand requests of another";
  }
  finish();
}

TEST_F(Pools, ThreadsBlockSignals) {
  start();
  std::atomic<bool> done{false};
  std::atomic<int> blocked{0};
  pool->submit([&] {
    sigset_t set;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &set);
    for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD}) blocked += ::sigismember(&set, signal);
    done = true;
  });
  ASSERT_TRUE(eventually([&] { return done.load(); }));
  EXPECT_EQ(blocked, 4);
}

TEST_F(Pools, ThreadsDoNotBlockFaultSignals) {
  start();
  std::atomic<bool> done{false};
  std::atomic<int> blocked{0};
  pool->submit([&] {
    sigset_t set;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &set);
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) blocked += ::sigismember(&set, signal);
    done = true;
  });
  ASSERT_TRUE(eventually([&] { return done.load(); }));
  EXPECT_EQ(blocked, 0);
}

// ---- The executor

TEST_F(Pools, TheExecutorIsEnteredOnceForManyJobs) {
  const auto executor = std::make_shared<CountingExecutor>();
  start({}, executor);
  std::atomic<int> inside{0}, outside{0};
  Gate gate;
  pool->submit_handler([&] { gate.wait(); }, true);
  for (int i = 0; i < 1000; ++i) {
    pool->submit_handler([&] { ++(executor->holder != nullptr ? inside : outside); }, true);
  }
  gate.open();
  ASSERT_TRUE(eventually([&] { return inside + outside == 1000; }));
  EXPECT_EQ(outside, 0);
  EXPECT_LE(executor->entered, 20);
}

TEST_F(Pools, AHandlerThatReleasesTheExecutorHandsItOver) {
  const auto executor = std::make_shared<CountingExecutor>();
  start({}, executor);
  std::atomic<int> waiting{0};
  Gate gate;
  for (int i = 0; i < 10; ++i) {
    pool->submit_handler(
        [&] {
          executor->while_outside([&] {
            ++waiting;
            gate.wait();
          });
        },
        true);
  }
  EXPECT_TRUE(eventually([&] { return waiting == 10; }));
  gate.open();
  finish();
}

TEST_F(Pools, PlainJobsDoNotWaitForTheExecutor) {
  const auto executor = std::make_shared<CountingExecutor>();
  start({}, executor);
  Gate gate;
  std::atomic<int> done{0};
  pool->submit_handler([&] { gate.wait(); }, true);  // holds the executor
  for (int i = 0; i < 20; ++i) pool->submit_handler([] {}, true);
  for (int i = 0; i < 20; ++i) pool->submit_handler([&] { EXPECT_EQ(done++ < 20, true); });
  EXPECT_TRUE(eventually([&] { return done == 20; }));
  EXPECT_LE(pool->threads(), 20) << "one thread waits for the executor, not all";
  gate.open();
  finish();
}

TEST_F(Pools, EveryThreadIsAttachedOnceAndDetachedAtItsEnd) {
  const auto executor = std::make_shared<CountingExecutor>();
  start({.idle = milliseconds(20)}, executor);
  std::atomic<int> done{0};
  for (int i = 0; i < 200; ++i) {
    pool->submit_handler(
        [&] {
          executor->while_outside([] { std::this_thread::sleep_for(milliseconds(1)); });
          ++done;
        },
        true);
  }
  ASSERT_TRUE(eventually([&] { return done == 200; }));
  EXPECT_LE(executor->attached, 40);
  pool->stop(seconds(10));
  EXPECT_EQ(executor->attached, executor->detached);
}

// ---- Endings

TEST_F(Pools, StopRunsAcceptedJobsAndRefusesNewOnes) {
  const auto executor = std::make_shared<CountingExecutor>();
  start({.least = 2, .most = 4}, executor);
  std::atomic<int> done{0};
  Gate gate;
  for (int i = 0; i < 4; ++i) pool->submit_handler([&] { gate.wait(); });
  for (int i = 0; i < 50; ++i) {
    pool->submit([&] { ++done; });
    pool->submit([&] { ++done; }, true);
  }
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(30));
    gate.open();
  });
  pool->stop(seconds(10));
  EXPECT_EQ(done, 100);
  EXPECT_EQ(pool->threads(), 0);
  EXPECT_FALSE(pool->submit([&] { ++done; }));
  EXPECT_FALSE(pool->submit_handler([&] { ++done; }, true));
  EXPECT_FALSE(pool->submit_long([&] { ++done; }));
  EXPECT_EQ(done, 100);
  opener.join();
}

TEST_F(Pools, StopReturnsInTimeDespiteBusyHandlers) {
  start();
  Gate gate;
  std::atomic<int> inside{0};
  for (int i = 0; i < 5; ++i) {
    pool->submit_handler([&] {
      ++inside;
      gate.wait();
    });
  }
  ASSERT_TRUE(eventually([&] { return inside == 5; }));
  pool->stop(milliseconds(50));  // returns, although no handler does before the gate opens
  EXPECT_TRUE(eventually([&] { return pool->threads() == 5; }));
  gate.open();
  EXPECT_TRUE(eventually([&] { return pool->threads() == 0; }));
}

TEST_F(Pools, StopMayBeCalledByAThreadOfThePool) {
  start();
  std::atomic<bool> stopped{false};
  pool->submit_handler([&] {
    pool->stop(seconds(10));
    stopped = true;
  });
  EXPECT_TRUE(eventually([&] { return stopped.load(); }));
  EXPECT_TRUE(eventually([&] { return pool->threads() == 0; }));
}

// ---- Stress

TEST_F(Pools, NoWakeUpIsLostUnderRandomLoad) {
  const auto executor = std::make_shared<CountingExecutor>();
  start({.idle = milliseconds(2)}, executor);
  std::atomic<int> late{0}, done{0};
  const auto job = [&](auto submitted, unsigned kind) {
    if (std::chrono::steady_clock::now() - submitted > seconds(30)) ++late;
    if (kind % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(kind * 40));
    std::optional<WaitInHandler> place;
    if (kind % 16 == 1) place.emplace();
    ++done;
  };
  std::vector<std::shared_ptr<Doorbell>> bells;
  std::atomic<unsigned> found{0};
  for (int i = 0; i < 3; ++i) {
    bells.push_back(std::make_shared<Doorbell>([&] {
      const auto now = std::chrono::steady_clock::now();
      pool->submit_handler([&, now, kind = found++] { job(now, kind % 64); }, found % 3 == 0);
    }));
    pool->add(bells.back()->fd.get(), bells.back(), Pool::Watch::always);
  }
  const int each = rounds(200'000);
  std::vector<std::thread> callers;
  for (unsigned t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < each; ++i) {
        const auto kind = static_cast<unsigned>(random() % 64);
        const auto now = std::chrono::steady_clock::now();
        switch (random() % 4) {
          case 0:
            pool->submit([&, now, kind] { job(now, kind); }, kind % 2 == 0);
            break;
          case 1:
            pool->submit_long([&, now, kind] { job(now, kind); });
            break;
          default:
            bells[random() % bells.size()]->ring();
        }
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      }
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_TRUE(eventually([&] { return done == 4 * each; })) << done << " of " << 4 * each;
  EXPECT_EQ(late, 0);
  finish();
}

}  // namespace
}  // namespace tensorferry
