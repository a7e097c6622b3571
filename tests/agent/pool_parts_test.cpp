// The parts of a pool: its jobs, the count of its threads, and the descriptors that its leader watches.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "agent/pool/pool_jobs.h"
#include "agent/pool/pool_threads.h"
#include "agent/pool/readable_set.h"
#include "base/file_descriptor.h"

namespace tensorferry {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Jobs that note their names, and the takes and ends of a thread that runs them one by one.
struct JobsOf : public ::testing::Test {
  PoolJobs::Job job(std::string name, bool with_executor = false) {
    PoolJobs::Job job;
    job.run = [this, name = std::move(name)] { ran.push_back(name); };
    job.with_executor = with_executor;
    return job;
  }
  PoolJobs::Job handler(std::string name, const void* sender = nullptr, bool with_executor = false) {
    auto job = this->job(std::move(name), with_executor);
    job.handler = true;
    job.sender = sender;
    return job;
  }
  /// Takes the next job and begins it.
  PoolJobs::Job begin(bool with_executor = false) {
    auto job = jobs.take(with_executor);
    EXPECT_TRUE(jobs.may_begin(job));
    jobs.begin(job);
    job.run();
    return job;
  }
  void run_all() {
    while (jobs.startable(false) != 0) jobs.end(begin());
  }
  PoolJobs jobs{2};
  std::vector<std::string> ran;
};

TEST_F(JobsOf, APoolStartInOrderAndBeforeHandlers) {
  jobs.add(handler("h"));
  jobs.add(job("a"));
  jobs.add(job("x", true));
  jobs.add(job("b"));
  EXPECT_EQ(jobs.startable(false), 3U);
  EXPECT_EQ(jobs.startable(true), 1U);
  run_all();
  EXPECT_EQ(ran, (std::vector<std::string>{"a", "b", "h"}));
  EXPECT_FALSE(jobs.caught_up());
  jobs.end(begin(true));
  EXPECT_TRUE(jobs.caught_up());
  EXPECT_FALSE(jobs.busy());
  EXPECT_EQ(jobs.finished_since_last(), 4U);
  EXPECT_EQ(jobs.finished_since_last(), 0U);
}

TEST_F(JobsOf, HandlersShareThePlacesOfBothQueues) {
  for (const auto* name : {"a", "b", "c"}) jobs.add(handler(name));
  jobs.add(handler("x", nullptr, true));
  EXPECT_EQ(jobs.startable(false), 2U);
  auto a = begin();
  auto x = begin(true);
  EXPECT_FALSE(jobs.place_free());
  EXPECT_EQ(jobs.startable(false), 0U);
  EXPECT_EQ(jobs.running(), 2);
  EXPECT_EQ(jobs.waiting(), 2U);
  EXPECT_TRUE(jobs.caught_up());  // what waits for a place waits for no thread

  jobs.free_place();  // "a" waits for a peer
  auto b = begin();
  jobs.retake_place();
  EXPECT_EQ(jobs.running(), 3);
  jobs.end(b);
  EXPECT_EQ(jobs.startable(false), 0U);  // "a" and "x" have both places
  jobs.end(a);
  jobs.end(x);
  run_all();
  EXPECT_EQ(ran, (std::vector<std::string>{"a", "x", "b", "c"}));
}

TEST_F(JobsOf, AHandlerThatMayNotBeginGoesBack) {
  jobs.add(handler("a"));
  jobs.add(handler("b"));
  auto taken = jobs.take(false);
  jobs.end(begin());
  auto direct = handler("direct");  // a job that was in no queue
  jobs.begin_work();
  jobs.retake_place();
  jobs.retake_place();
  EXPECT_FALSE(jobs.may_begin(direct));
  EXPECT_TRUE(jobs.may_begin(job("needs no place")));
  jobs.put(std::move(taken));
  jobs.put(std::move(direct));
  EXPECT_EQ(jobs.waiting(), 2U);
  EXPECT_TRUE(jobs.caught_up());
  jobs.free_place();
  EXPECT_FALSE(jobs.caught_up());
  run_all();
  EXPECT_EQ(ran, (std::vector<std::string>{"b", "a", "direct"}));
  EXPECT_FALSE(jobs.busy());
}

TEST_F(JobsOf, APausedSenderWait) {
  const int mine = 0, other = 0;
  jobs.add(handler("mine", &mine));
  jobs.add(handler("other", &other));
  jobs.pause(&mine);
  EXPECT_EQ(jobs.startable(false), 1U);
  EXPECT_FALSE(jobs.may_begin(handler("direct", &mine)));
  run_all();
  EXPECT_EQ(ran, (std::vector<std::string>{"other"}));
  EXPECT_FALSE(jobs.any_handler_waits());
  jobs.resume(&mine);
  EXPECT_TRUE(jobs.any_handler_waits());
  run_all();
  EXPECT_EQ(ran, (std::vector<std::string>{"other", "mine"}));
}

TEST_F(JobsOf, AnEndedLinkNeedNoPlace) {
  const int ended = 0, other = 0;
  jobs.retake_place();
  jobs.retake_place();
  jobs.add(handler("ended", &ended));
  jobs.add(handler("other", &other));
  jobs.pause(&ended);
  jobs.start_waiting(&ended);
  run_all();
  EXPECT_EQ(ran, (std::vector<std::string>{"ended"}));
  EXPECT_EQ(jobs.running(), 2);
}

TEST_F(JobsOf, AnExpiredRequestNeedNoPlace) {
  const Clock::time_point now(seconds(1000));
  EXPECT_FALSE(jobs.start_expired(now));  // there are none
  jobs.retake_place();
  jobs.retake_place();
  auto expired = handler("expired");
  expired.deadline = now - seconds(1);
  auto later = handler("later");
  later.deadline = now + seconds(100);
  jobs.add(handler("none"));
  jobs.add(std::move(later));
  jobs.add(std::move(expired));
  EXPECT_TRUE(jobs.start_expired(now));
  EXPECT_FALSE(jobs.start_expired(now + std::chrono::milliseconds(99)));  // it has looked just now
  run_all();
  EXPECT_EQ(ran, (std::vector<std::string>{"expired"}));
  EXPECT_EQ(jobs.waiting(), 2U);
}

/// Starts this many threads and parks them.
void park(PoolThreads& threads, int count) {
  for (int i = 0; i < count; ++i) {
    EXPECT_TRUE(threads.start());
    threads.started();
    threads.park();
  }
}

TEST(PoolThreads, AreBoundedButForThoseThatWaitForAPeer) {
  PoolThreads threads({.least = 1, .most = 3});
  int started = 0;
  while (threads.start()) ++started;
  EXPECT_EQ(started, 3 + PoolThreads::own);
  EXPECT_EQ(threads.count(), started);
  EXPECT_EQ(threads.coming(), started);
  threads.block();
  EXPECT_TRUE(threads.start());
  EXPECT_FALSE(threads.start());
  threads.unblock();
  threads.start_failed();
  EXPECT_FALSE(threads.start());
  threads.started();
  threads.ending();
  threads.ended();
  EXPECT_EQ(threads.count(), started - 1);
  EXPECT_TRUE(threads.start());
}

TEST(PoolThreads, GetOneWakeUpEach) {
  PoolThreads threads({.least = 1, .most = 8});
  EXPECT_FALSE(threads.wake());
  park(threads, 2);
  EXPECT_TRUE(threads.wake());
  EXPECT_TRUE(threads.wake());
  EXPECT_EQ(threads.coming(), 2);
  EXPECT_FALSE(threads.any_parked());
  EXPECT_FALSE(threads.wake());
  threads.unpark();
  EXPECT_EQ(threads.coming(), 1);
  threads.unpark();
  EXPECT_FALSE(threads.wake());
  threads.park();
  threads.unpark();  // by a writer to a ring, without a wake-up of this process
  EXPECT_EQ(threads.coming(), 0);
}

TEST(PoolThreads, EndIfTheyWereNotNeededForAPeriod) {
  PoolThreads threads({.least = 1, .most = 8, .idle = milliseconds(1000)});
  const auto start = Clock().now();
  park(threads, 4);
  // Each period counts the threads that were parked throughout it. One begins here.
  EXPECT_FALSE(threads.leave_as_surplus(start));
  threads.unpark();
  threads.unpark();
  threads.park();
  threads.park();
  EXPECT_FALSE(threads.leave_as_surplus(start + milliseconds(999)));
  int left = 0;
  while (threads.leave_as_surplus(start + milliseconds(1001 + left))) ++left;
  EXPECT_EQ(left, 2);
}

TEST(PoolThreads, StayIfThereAreNoMoreThanTheLeast) {
  PoolThreads threads({.least = 2, .most = 8});
  park(threads, 3);
  EXPECT_FALSE(threads.at_minimum(0));
  EXPECT_TRUE(threads.at_minimum(1)) << "one of the three runs a handler";
  threads.ending();
  EXPECT_TRUE(threads.at_minimum(0));
  threads.ended();
  EXPECT_TRUE(threads.at_minimum(0));
}

TEST(PoolThreads, MayBeMoreForSpeedIfAllHaveWork) {
  PoolThreads threads({.least = 1, .most = 1024});
  EXPECT_TRUE(threads.start());
  EXPECT_FALSE(threads.may_add_for_speed());  // it starts
  threads.started();
  EXPECT_TRUE(threads.may_add_for_speed());
  threads.park();
  EXPECT_FALSE(threads.may_add_for_speed());
  threads.unpark();
  int added = 0;
  for (; threads.may_add_for_speed(); ++added) {
    EXPECT_TRUE(threads.start());
    threads.started();
  }
  EXPECT_GE(added, 8);
}

struct NoReader final : Readable {
  void on_readable() override {}
};

/// A pipe whose reading end is in a set.
struct PipeIn {
  PipeIn(ReadableSet& set, ReadableSet::Watch watch) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    in = FileDescriptor(ends[0]);
    out = FileDescriptor(ends[1]);
    set.add(in.get(), std::make_shared<NoReader>(), watch);
  }
  void write() const { EXPECT_EQ(::write(out.get(), "x", 1), 1); }
  FileDescriptor in, out;
};

/// Waits without sleeping: an interrupt comes first.
std::vector<int> ready_now(ReadableSet& set) {
  std::mutex mutex;
  std::unique_lock lock(mutex);
  set.interrupt();
  const auto ready = set.wait(lock);
  EXPECT_TRUE(lock.owns_lock());
  EXPECT_FALSE(set.waits());
  return {ready.fds.begin(), ready.fds.begin() + static_cast<std::ptrdiff_t>(ready.count)};
}

TEST(ReadableSet, ReportsAReadableDescriptorUntilItIsDisarmed) {
  ReadableSet set;
  const PipeIn pipe(set, ReadableSet::Watch::always);
  EXPECT_TRUE(ready_now(set).empty());
  pipe.write();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(ready_now(set), std::vector{pipe.in.get()});
  set.disarm(pipe.in.get());
  EXPECT_TRUE(ready_now(set).empty());
  set.arm(pipe.in.get());
  EXPECT_EQ(ready_now(set), std::vector{pipe.in.get()});
}

TEST(ReadableSet, ReportsABlockingDescriptorOncePerArm) {
  ReadableSet set;
  const PipeIn pipe(set, ReadableSet::Watch::blocking);
  pipe.write();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(ready_now(set), std::vector{pipe.in.get()});
    EXPECT_TRUE(ready_now(set).empty());
    set.arm(pipe.in.get());
  }
}

TEST(ReadableSet, ReportsAClosingDescriptorOnlyWhileArmed) {
  ReadableSet set;
  const PipeIn pipe(set, ReadableSet::Watch::closing);
  pipe.write();
  EXPECT_TRUE(ready_now(set).empty());
  set.arm(pipe.in.get());
  EXPECT_EQ(ready_now(set), std::vector{pipe.in.get()});
  EXPECT_TRUE(ready_now(set).empty());  // edge-triggered
}

TEST(ReadableSet, ForgetsADescriptorThatIsRemoved) {
  ReadableSet set;
  const PipeIn pipe(set, ReadableSet::Watch::always);
  pipe.write();
  ASSERT_NE(set.find(pipe.in.get()), nullptr);
  EXPECT_NE(set.remove(pipe.in.get()), nullptr);
  EXPECT_EQ(set.find(pipe.in.get()), nullptr);
  EXPECT_EQ(set.remove(pipe.in.get()), nullptr);
  EXPECT_TRUE(ready_now(set).empty());
  set.arm(pipe.in.get());
  EXPECT_TRUE(ready_now(set).empty());
}

}  // namespace
}  // namespace tensorferry
