#include "tests/emulated_gpu/grid.h"

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace emulated {
namespace {

class BlockThreads final {
 public:
  static BlockThreads& of_this_process() {
    static auto& threads = *new BlockThreads;
    return threads;
  }

  /// Runs the block at once, on a thread that runs nothing else: blocks wait for one another.
  void run(std::function<void()> block) {
    const std::lock_guard lock(mutex_);
    blocks_.push_back(std::move(block));
    if (free_ < blocks_.size()) {
      ++free_;
      std::thread([this] { main(); }).detach();
    } else {
      changed_.notify_one();
    }
  }

 private:
  void main() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !blocks_.empty(); });
      const auto block = std::move(blocks_.front());
      blocks_.pop_front();
      --free_;
      lock.unlock();
      block();
      lock.lock();
      ++free_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> blocks_;  // that no thread has taken
  std::size_t free_ = 0;                      // threads that run none; never fewer than there are blocks
};

}  // namespace

RunningGrid::RunningGrid(const std::function<void(unsigned int)>& run_block, unsigned int blocks)
    : left_(std::make_shared<std::atomic<unsigned int>>(blocks)) {
  for (unsigned int block = 0; block < blocks; ++block) {
    BlockThreads::of_this_process().run([left = left_, run_block, block] {
      run_block(block);
      --*left;
      left->notify_all();
    });
  }
}

RunningGrid::~RunningGrid() {
  for (auto left = left_->load(); left != 0; left = left_->load()) left_->wait(left);
}

}  // namespace emulated
