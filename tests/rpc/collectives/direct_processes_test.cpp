// Two ranks in processes that have a GPU each. The kernels meet by flags in memory that the processes map of each
// other. Or they share a GPU, and meet by streams and by their hosts.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "base/shared_memory.h"
#include "channels/cuda/invalidate.h"
#include "channels/cuda/pinned.h"
#include "rpc/collectives/cuda/direct_group.h"
#include "rpc/collectives/cuda/symmetric_memory.h"
#include "rpc/collectives/groups.h"
#include "tests/agent/agents.h"
#include "tests/agent/folder_store.h"
#include "tests/agent/patience.h"
#include "tests/rpc/collectives/gpu.h"
#include "tests/rpc/collectives/world.h"

namespace tensorferry::testing {
namespace {

using collectives::StartOptions;
using collectives::cuda::DirectGroup;
using ::testing::HasSubstr;

/// One of the ranks, on the GPU of its number, or on the first one if they share it.
class ProcessRank {
 public:
  ProcessRank(std::size_t rank, const std::string& folder, bool share)
      : gpu_(share ? 0 : static_cast<int>(rank), std::size_t{64} << 20) {
    agent_ = join(std::make_shared<FolderStore>(folder), "rank" + std::to_string(rank));
    groups_ = collectives::Groups::serve(agent_);
    collectives::GroupSettings settings;
    settings.timeout = std::chrono::seconds(40);
    auto formed = groups_->form({"rank0", "rank1"}, settings);
    EXPECT_TRUE(formed.ok()) << formed.status().text();
    group = *formed;
    direct_ = DirectGroup::of(group);
    const auto staged = direct_->prepare(gpu_.device, {});
    EXPECT_TRUE(staged.ok() && staged->empty()) << (staged.ok() ? *staged : staged.status().text());
    EXPECT_THAT(group->explain(collectives::Operation::all_reduce, 100),
                HasSubstr(share ? "the 2 ranks share a GPU" : "whose kernels meet by flags"));
  }
  void leave() {
    direct_->drain();
    group->close();
    groups_->leave();
    agent_->leave();
  }
  /// Sums in place.
  Status sum(std::span<std::byte> values) { return sum(values, values); }
  Status sum(std::span<const std::byte> values, std::span<std::byte> to) { return sum_on(gpu_.stream, values, to); }
  Status sum_on(CUstream stream, std::span<const std::byte> values, std::span<std::byte> to) {
    StartOptions options;
    options.background = false;
    options.timeout = timeout;
    run = direct_->run_on(gpu_.device, stream);
    options.device = run;
    return ended(group->all_reduce(values, to, DType::int32, Reduction::sum, std::move(options)));
  }
  /// Sums in place at `root`.
  Status sum_at(std::size_t root, std::span<std::byte> values) {
    StartOptions options;
    options.background = false;
    options.device = direct_->run_on(gpu_.device, gpu_.stream);
    return ended(group->reduce(values, values, DType::int32, Reduction::sum, root, std::move(options)));
  }
  /// Gathers `own`, into the halves of `both`.
  Status gather(std::span<const std::byte> own, std::span<std::byte> both) {
    StartOptions options;
    options.background = false;
    options.device = direct_->run_on(gpu_.device, gpu_.stream);
    const std::vector<std::span<std::byte>> outputs{both.first(both.size() / 2), both.subspan(both.size() / 2)};
    return ended(group->all_gather(own, outputs, DType::int32, true, std::move(options)));
  }
  std::span<std::byte> put(std::size_t count, std::int32_t value) {
    const std::vector<std::int32_t> given(count, value);
    return gpu_.put(std::as_bytes(std::span(given)));
  }
  [[nodiscard]] bool holds(std::span<const std::byte> values, std::int32_t expected) {
    const std::vector<std::int32_t> wanted(values.size() / 4, expected);
    return std::ranges::equal(gpu_.get(values), std::as_bytes(std::span(wanted)));
  }
  Gpu& gpu() { return gpu_; }
  std::shared_ptr<collectives::RawGroup> group;
  std::shared_ptr<collectives::cuda::DeviceRun> run;  // of the last sum
  Milliseconds timeout{0};                            // of sums; 0: the group's

 private:
  Gpu gpu_;
  std::shared_ptr<RawAgent> agent_;
  std::shared_ptr<collectives::Groups> groups_;
  std::shared_ptr<DirectGroup> direct_;
};

/// Forks before the driver is loaded. `second` is what the child does as rank 1, and returns its exit status.
class DirectProcesses : public ::testing::Test {
 protected:
  void start(const std::function<int(ProcessRank&)>& second) {
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
    child_ = ::fork();
    if (child_ == 0) {
      if (!conformance::why_no_cuda(gpus_).empty()) ::_exit(0);
      int status = 0;
      {
        ProcessRank rank(1, folder_, gpus_ == 1);
        status = second(rank);
      }  // ends its threads, which ThreadSanitizer would report at the exit
      ::_exit(HasFailure() ? 77 : status);
    }
    if (const auto why = conformance::why_no_cuda(gpus_); !why.empty()) GTEST_SKIP() << why;
    first_ = std::make_unique<ProcessRank>(0, folder_, gpus_ == 1);
  }
  /// Says that a rank has come so far, which the other one awaits.
  void reach(const std::string& mark) const { std::filesystem::create_directory(folder_ + "-" + mark); }
  [[nodiscard]] bool await(const std::string& mark) const {
    return eventually([&] { return std::filesystem::exists(folder_ + "-" + mark); });
  }
  /// What a second rank does that calls nothing.
  [[nodiscard]] int stays_until_seen() const {
    EXPECT_TRUE(await("seen"));
    return 0;
  }
  int child_status() {
    int status = -1;
    ::waitpid(std::exchange(child_, -1), &status, 0);
    return status;
  }
  /// Kills the second rank, for which the first one's GPU waits.
  void kill_the_second_and_expect_release() {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ::kill(child_, SIGKILL);
    const auto began = std::chrono::steady_clock::now();
    first_->gpu().synchronize();
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
    EXPECT_EQ(first_->group->failed().code(), Code::connection_lost);
    EXPECT_THAT(first_->group->failed().text(), HasSubstr("rank 1"));
  }
  void kill_the_second_before_its_stream_comes(std::size_t count);
  void TearDown() override {
    if (child_ > 0) {
      ::kill(child_, SIGKILL);
      child_status();
    }
    first_.reset();
    EXPECT_TRUE(eventually([&] {  // the agent's store may still write there
      std::error_code failed;
      std::filesystem::remove_all(folder_, failed);
      return !failed;
    }));
    for (const auto* mark : {"-called", "-seen"}) std::filesystem::remove(folder_ + mark);
  }
  int gpus_ = 2;
  std::string folder_ = "/tmp/tensorferry-direct-XXXXXX";
  pid_t child_ = -1;
  std::unique_ptr<ProcessRank> first_;
};

/// Reduces tensors of several sizes, and replays a graph between them.
void reduce_and_replay(ProcessRank& rank, std::int32_t own) {
  auto captured = rank.put(90'000, own);
  ASSERT_TRUE(rank.sum(captured).ok());
  EXPECT_TRUE(rank.holds(captured, 3));
  CapturedGraph graph(rank.gpu(), [&] { ASSERT_TRUE(rank.sum(captured).ok()); });
  std::int32_t expected = 3;
  for (const std::size_t count : {1, 70'000, 300'001, 37, 3'000'000}) {
    const auto values = rank.put(count, own);
    const auto status = rank.sum(values);
    ASSERT_TRUE(status.ok()) << status.text();
    EXPECT_TRUE(rank.holds(values, 3)) << count;
    graph.launch();
    expected *= 2;
    EXPECT_TRUE(rank.holds(captured, expected)) << count;
  }
}

TEST_F(DirectProcesses, ReduceAndReplayGraphs) {
  start([](ProcessRank& rank) {
    reduce_and_replay(rank, 2);
    rank.leave();
    return 0;
  });
  if (IsSkipped()) return;
  reduce_and_replay(*first_, 1);
  first_->leave();
  EXPECT_EQ(child_status(), 0);
}

class DirectProcessesOfOneGpu : public DirectProcesses {
 protected:
  DirectProcessesOfOneGpu() { gpus_ = 1; }
};

/// Sums tensors that the hosts reduce, that cross the host in one chunk and in several, and that do not, in turns; also
/// some that begin at no multiple of 16 bytes.
void sum_on_one_gpu(ProcessRank& rank, std::int32_t own) {
  for (const std::size_t count : {70'000, 1, 300'001, 65'536, 1'000'003, 70'001, 1'100'000, 200'000}) {
    for (const std::size_t skipped : {0, 1}) {
      const auto values = rank.put(count + skipped, own).subspan(4 * skipped);
      auto status = rank.sum(values);
      ASSERT_TRUE(status.ok()) << status.text();
      EXPECT_TRUE(rank.holds(values, 3)) << count;
      status = rank.sum_at(1, values);
      ASSERT_TRUE(status.ok()) << status.text();
      EXPECT_TRUE(rank.holds(values, own == 2 ? 6 : 3)) << count;
      status = rank.sum(values);
      ASSERT_TRUE(status.ok()) << status.text();
      EXPECT_TRUE(rank.holds(values, 9)) << count;
    }
  }
}

TEST_F(DirectProcessesOfOneGpu, ReduceTensorsOfAnySize) {
  start([](ProcessRank& rank) {
    sum_on_one_gpu(rank, 2);
    rank.leave();
    return 0;
  });
  if (IsSkipped()) return;
  sum_on_one_gpu(*first_, 1);
  first_->leave();
  EXPECT_EQ(child_status(), 0);
}

/// Sums symmetric memory of both ranks, in one shot and in two, and by streams that meet.
void sum_in_place(ProcessRank& rank, std::int32_t own) {
  for (const std::size_t count : {1000, 200'000, 3'000'000}) {
    const auto values = rank.put(count, own), out = rank.put(count, 0);
    collectives::cuda::mark_symmetric(rank.gpu().device, values.data(), values.size());
    for (int turn = 0; turn < 3; ++turn) {
      const auto status = rank.sum(values, out);
      ASSERT_TRUE(status.ok()) << status.text();
      EXPECT_TRUE(rank.holds(out, 3)) << count;
      EXPECT_TRUE(rank.holds(values, own)) << count;
    }
    ASSERT_TRUE(rank.sum(values).ok());
    EXPECT_TRUE(rank.holds(values, 3)) << count;
  }
  EXPECT_THAT(rank.group->explain(collectives::Operation::all_reduce, 100),
              HasSubstr("inputs in 1 allocations of other ranks are read in place"));
  ASSERT_TRUE(ended(rank.group->barrier()).ok());  // the allocations stay until both have seen that
}

TEST_F(DirectProcesses, ReadSymmetricInputsInPlaceUntilTheyGo) {
  start([](ProcessRank& rank) {
    sum_in_place(rank, 2);
    invalidate_cuda_memory(rank.put(1, 0).data(), 4);  // the allocation goes
    const auto values = rank.put(10, 2);
    EXPECT_TRUE(rank.sum(values).ok());
    EXPECT_TRUE(rank.holds(values, 3));
    rank.leave();
    return 0;
  });
  if (IsSkipped()) return;
  sum_in_place(*first_, 1);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  const auto is_mapped = [&] {
    return first_->group->explain(collectives::Operation::all_reduce, 100).find("read in place") != std::string::npos;
  };
  while (is_mapped() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_FALSE(is_mapped());
  const auto values = first_->put(10, 1);
  ASSERT_TRUE(first_->sum(values).ok());
  EXPECT_TRUE(first_->holds(values, 3));
  first_->leave();
  EXPECT_EQ(child_status(), 0);
}

TEST_F(DirectProcesses, BeginASmallOperationBeforeTheOtherCallsIt) {
  start([this](ProcessRank& rank) {
    const auto values = rank.put(100, 2);
    EXPECT_TRUE(await("called"));
    EXPECT_TRUE(rank.sum(values).ok());
    EXPECT_TRUE(rank.holds(values, 3));
    rank.leave();
    return 0;
  });
  if (IsSkipped()) return;
  const auto values = first_->put(100, 1);
  EXPECT_TRUE(first_->sum(values).ok());
  EXPECT_FALSE(first_->run->ended());
  reach("called");
  EXPECT_TRUE(first_->holds(values, 3));
  EXPECT_TRUE(first_->run->ended());
  EXPECT_TRUE(first_->run->status().ok());
  first_->leave();
  EXPECT_EQ(child_status(), 0);
}

/// Waits until the group has failed, and returns why.
Status failure_of(ProcessRank& rank) {
  EXPECT_TRUE(eventually([&] { return !rank.group->failed().ok(); }));
  return rank.group->failed();
}

TEST_F(DirectProcesses, ThatCallDifferentSmallOperationsFailTheGroup) {
  const auto check = [](ProcessRank& rank, std::size_t count) {
    const auto values = rank.put(count, 1);
    EXPECT_TRUE(rank.sum(values).ok());
    const auto why = failure_of(rank);
    EXPECT_EQ(why.code(), Code::invalid_argument);
    EXPECT_THAT(why.text(), HasSubstr("rank 1 (\"rank1\") called all_reduce(sum) of 10000 int32 elements on a GPU, but "
                                      "rank 0 (\"rank0\") called all_reduce(sum) of 100 int32 elements on a GPU"));
    rank.gpu().synchronize();
    EXPECT_TRUE(rank.run->ended());
    EXPECT_EQ(rank.run->status().code(), Code::invalid_argument);
    EXPECT_EQ(rank.sum(values).code(), Code::invalid_argument);
  };
  start([&](ProcessRank& rank) {
    check(rank, 10'000);
    reach("seen");
    return 0;
  });
  if (IsSkipped()) return;
  check(*first_, 100);
  EXPECT_TRUE(await("seen"));
  EXPECT_EQ(child_status(), 0);
}

TEST_F(DirectProcesses, NameTheOperationOnTheHostThatAnotherCallsInstead) {
  start([this](ProcessRank& rank) {
    EXPECT_TRUE(await("called"));
    const auto status = ended(rank.group->barrier());
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_THAT(status.text(), HasSubstr("called barrier()"));
    EXPECT_TRUE(await("seen"));
    return 0;
  });
  if (IsSkipped()) return;
  const auto values = first_->put(100, 1);
  EXPECT_TRUE(first_->sum(values).ok());
  reach("called");
  EXPECT_THAT(failure_of(*first_).text(), HasSubstr("called barrier()"));
  first_->gpu().synchronize();
  EXPECT_EQ(first_->run->status().code(), Code::invalid_argument);
  reach("seen");
  EXPECT_EQ(child_status(), 0);
}

TEST_F(DirectProcesses, ThatDoNotComeToASmallOperationAreNamedAtItsTimeOut) {
  start([this](ProcessRank&) { return stays_until_seen(); });
  if (IsSkipped()) return;
  const auto values = first_->put(100, 1);
  first_->timeout = Milliseconds(50);
  EXPECT_TRUE(first_->sum(values).ok());
  const auto why = failure_of(*first_);
  EXPECT_EQ(why.code(), Code::deadline_exceeded);
  EXPECT_THAT(why.text(), HasSubstr("rank 1 (\"rank1\") has not come"));
  first_->gpu().synchronize();
  EXPECT_EQ(first_->run->status().code(), Code::deadline_exceeded);
  reach("seen");
  EXPECT_EQ(child_status(), 0);
}

TEST_F(DirectProcesses, ThatDoNotComeToAnEmptyOperationAreNamedByItsCall) {
  start([this](ProcessRank&) { return stays_until_seen(); });
  if (IsSkipped()) return;
  first_->timeout = Milliseconds(50);
  const auto why = first_->sum(first_->put(0, 1));
  EXPECT_EQ(why.code(), Code::deadline_exceeded);
  EXPECT_THAT(why.text(), HasSubstr("rank 1 (\"rank1\") has not come"));
  reach("seen");
  EXPECT_EQ(child_status(), 0);
}

/// Sums on two streams in turns, in a graph and in large pieces between, ahead of the other rank as far as it goes.
void sum_on_two_streams(ProcessRank& rank, std::int32_t own) {
  Gpu other(rank.gpu().device);
  const auto captured = rank.put(5, own), small = rank.put(20, own), large = rank.put(400'000, own);
  const auto out = rank.put(20, 0);
  ASSERT_TRUE(rank.sum(captured).ok());
  CapturedGraph graph(rank.gpu(), [&] { ASSERT_TRUE(rank.sum(captured).ok()); });
  rank.gpu().synchronize();  // the other stream follows the copies
  std::int32_t in_graph = 3;
  for (int turn = 0; turn < 60; ++turn) {
    const auto status = rank.sum_on(turn % 2 == 0 ? other.stream : rank.gpu().stream, small, out);
    ASSERT_TRUE(status.ok()) << status.text();
    if (turn % 20 == 19) {
      EXPECT_TRUE(rank.holds(out, 3)) << turn;
      graph.launch();
      in_graph *= 2;
      EXPECT_TRUE(rank.holds(captured, in_graph)) << turn;
    }
    if (turn == 30) {
      ASSERT_TRUE(rank.sum(large).ok());
      EXPECT_TRUE(rank.holds(large, 3));
    }
  }
}

TEST_F(DirectProcesses, OrderSmallOperationsAmongGraphsAndLargeOnes) {
  start([](ProcessRank& rank) {
    sum_on_two_streams(rank, 2);
    rank.leave();
    return 0;
  });
  if (IsSkipped()) return;
  sum_on_two_streams(*first_, 1);
  first_->leave();
  EXPECT_EQ(child_status(), 0);
}

TEST_F(DirectProcesses, ThatAreKilledEndTheExchangeOfAGraph) {
  const auto gather = [](ProcessRank& rank, std::span<const std::byte> own, std::span<std::byte> both) {
    EXPECT_TRUE(rank.gather(own, both).ok());
    EXPECT_TRUE(rank.holds(both.first(4000), 1));
    EXPECT_TRUE(rank.holds(both.subspan(4000), 2));
  };
  start([&](ProcessRank& rank) {
    const auto own = rank.put(1000, 2), both = rank.put(2000, 0);
    gather(rank, own, both);
    CapturedGraph graph(rank.gpu(), [&] { EXPECT_TRUE(rank.gather(own, both).ok()); });
    graph.launch();
    EXPECT_TRUE(rank.holds(both.subspan(4000), 2));
    ::pause();  // it launches the graph once
    return 0;
  });
  if (IsSkipped()) return;
  const auto own = first_->put(1000, 1), both = first_->put(2000, 0);
  gather(*first_, own, both);
  CapturedGraph graph(first_->gpu(), [&] { EXPECT_TRUE(first_->gather(own, both).ok()); });
  graph.launch();
  EXPECT_TRUE(first_->holds(both.first(4000), 1));
  graph.launch();
  kill_the_second_and_expect_release();
}

TEST_F(DirectProcesses, ThatAreKilledReleaseTheKernelsThatWaitForThem) {
  start([](ProcessRank& rank) {
    const auto values = rank.put(1000, 2);
    EXPECT_TRUE(rank.sum(values).ok());
    EXPECT_TRUE(rank.holds(values, 3));
    const CapturedGraph graph(rank.gpu(), [&] { EXPECT_TRUE(rank.sum(values).ok()); });
    ::pause();  // it launches no graph
    return 0;
  });
  if (IsSkipped()) return;
  const auto values = first_->put(1000, 1);
  ASSERT_TRUE(first_->sum(values).ok());
  EXPECT_TRUE(first_->holds(values, 3));
  CapturedGraph graph(first_->gpu(), [&] { ASSERT_TRUE(first_->sum(values).ok()); });
  graph.launch();
  kill_the_second_and_expect_release();
  EXPECT_THAT(first_->sum(values).text(), HasSubstr("rank 1"));
}

/// Of an operation on `count` values.
void DirectProcesses::kill_the_second_before_its_stream_comes(std::size_t count) {
  start([count](ProcessRank& rank) {
    const auto values = rank.put(count, 2);
    EXPECT_TRUE(rank.sum(values).ok());
    EXPECT_TRUE(rank.holds(values, 3));
    // Its stream waits for a word that nothing writes, so its part of the sum never comes.
    const cuda::Pinned page = *cuda::Pinned::lock(*SharedMemory::create(4096), rank.gpu().device);
    {
      const cuda::DeviceGuard here(rank.gpu().device);
      EXPECT_EQ(cuda::word_at(page, 0).wait_on(rank.gpu().stream, 1), CUDA_SUCCESS);
    }
    EXPECT_TRUE(rank.sum(values).ok());
    ::kill(::getpid(), SIGKILL);
    return 0;
  });
  if (IsSkipped()) return;
  const auto values = first_->put(count, 1);
  ASSERT_TRUE(first_->sum(values).ok());
  EXPECT_TRUE(first_->holds(values, 3));
  const auto status = first_->sum(values);  // enqueued, or the rank has died before it was
  first_->gpu().synchronize();
  const auto began = std::chrono::steady_clock::now();
  while (first_->group->failed().ok() && std::chrono::steady_clock::now() - began < std::chrono::seconds(10)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_THAT(first_->group->failed().text(), HasSubstr("rank 1"));
}

TEST_F(DirectProcesses, ThatAreKilledBeforeTheirStreamComesAreNamed) { kill_the_second_before_its_stream_comes(1000); }

TEST_F(DirectProcessesOfOneGpu, ThatAreKilledBeforeTheirStreamComesAreNamed) {
  kill_the_second_before_its_stream_comes(300'000);
}

}  // namespace
}  // namespace tensorferry::testing
