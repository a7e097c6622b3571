// The reference tables with many threads at once: no update may be lost between locks. Runs under ThreadSanitizer too.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/background.h"
#include "rpc/core/references.h"

namespace tensorferry {
namespace {

/// Delivers messages without delay, on threads of its own.
class Post {
 public:
  explicit Post(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
  }
  ~Post() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  void submit(UniqueFunction<void()> job) {
    const std::lock_guard lock(
        mutex_);  // held for the notify too: once the job has run, the owner may destroy this object
    jobs_.push_back(std::move(job));
    changed_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopped_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      {
        const auto job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        job();
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<UniqueFunction<void()>> jobs_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

struct Agents {
  std::vector<AgentId> ids;
  std::vector<std::shared_ptr<References>> all;
  [[nodiscard]] References* find(std::uint64_t incarnation) const {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i].incarnation == incarnation) return all[i].get();
    }
    return nullptr;
  }
};

class PostNetwork final : public References::Network {
 public:
  PostNetwork(Agents& agents, AgentId self, Post& post, Background& timer)
      : agents_(agents), self_(std::move(self)), post_(post), timer_(timer) {}
  void send(const AgentId& peer, Bytes message, UniqueFunction<void(Result<Bytes>)> done) override {
    post_.submit([this, to = peer.incarnation, message = std::move(message), done = std::move(done)] {
      auto answer = agents_.find(to)->receive_mail(self_, message);
      // Every tenth answer is lost, so the sender sends the message again.
      if (count_.fetch_add(1) % 10 == 9) return done(Status(Code::deadline_exceeded, "lost"));
      done(std::move(answer));
    });
  }
  void after(Milliseconds delay, UniqueFunction<void()> what) override {
    timer_.submit(std::move(what), Clock().now() + delay);
  }

 private:
  Agents& agents_;
  const AgentId self_;
  Post& post_;
  Background& timer_;
  std::atomic<int> count_{0};
};

/// Runs random operations of one thread on all agents.
void work(Agents& agents, unsigned seed, std::atomic<int>& alive) {
  struct Counted {
    std::atomic<int>& alive;
    explicit Counted(std::atomic<int>& a) : alive(a) { ++alive; }
    ~Counted() { --alive; }
  };
  std::mt19937 random(seed);
  std::vector<std::pair<std::size_t, std::shared_ptr<Reference>>> held;
  const auto pick = [&](std::size_t below) { return random() % below; };
  for (int i = 0; i < 400; ++i) {
    const auto from = pick(agents.all.size()), to = pick(agents.all.size());
    auto& here = *agents.all[from];
    auto& there = *agents.all[to];
    switch (pick(5)) {
      case 0:
        held.emplace_back(from, here.own({std::make_shared<Counted>(alive), false}));
        break;
      case 1: {
        auto handle = here.begin_creation(agents.ids[to]);
        EXPECT_TRUE(there.create(agents.ids[from], handle->ids()).ok());
        there.fetch(handle->object(), Clock().now() + std::chrono::seconds(60), [](const Result<Outcome>&) {});
        there.fulfil(handle->object(), Outcome{std::make_shared<Counted>(alive), false});
        here.end_creation(*handle, {});
        held.emplace_back(from, std::move(handle));
        break;
      }
      case 2:
      case 3: {
        if (held.empty()) break;
        const auto& [at, reference] = held[pick(held.size())];
        const auto call = there.begin_call();
        auto transfer = agents.all[at]->pass_to(agents.ids[to]);
        const auto record = transfer.add(*reference);
        EXPECT_TRUE(record.ok());
        transfer.sent();
        const bool failed = pick(4) == 0;
        if (failed) transfer.ended({Code::deadline_exceeded, "late"});
        auto received = there.receive(*record, agents.ids[at]);
        EXPECT_TRUE(received.ok() || failed);
        if (!failed) transfer.replied(call);
        there.end_call(call);
        if (received.ok()) held.emplace_back(to, *received);
        break;
      }
      default:
        if (held.empty()) break;
        held[pick(held.size())] = held.back();
        held.pop_back();
    }
  }
}

TEST(ReferencesThreads, NothingLeaksAndNothingRaces) {
  Agents agents;
  Background timer;
  std::atomic<int> alive{0};
  {
    Post post(3);
    for (std::uint64_t i = 1; i <= 4; ++i) {
      agents.ids.push_back({"agent" + std::to_string(i), i});
      agents.all.push_back(References::make(agents.ids.back(),
                                            std::make_shared<PostNetwork>(agents, agents.ids.back(), post, timer),
                                            {.retry = Milliseconds(1), .ask_after = Milliseconds(20)}));
    }
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back([&, seed] { work(agents, seed, alive); });
    for (auto& thread : threads) thread.join();

    const auto until = Clock().now() + std::chrono::seconds(30);
    const auto quiet = [&] {
      for (const auto& references : agents.all) {
        if (!references->settled() || references->counts() != References::Counts()) return false;
      }
      return alive == 0;  // the last values are freed after the counts
    };
    while (!quiet() && Clock().now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_TRUE(quiet()) << alive << " values are alive";
    for (const auto& references : agents.all) references->close();
  }
}

}  // namespace
}  // namespace tensorferry
