/// The blocks of a kernel that meets other ranks, each on a thread of its own.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

namespace emulated {

/// The threads stay, and run the blocks of later grids: under a sanitizer, a thread's start takes longer than most
/// blocks.
class RunningGrid final {
 public:
  /// `run_block` is called with the number of each block.
  RunningGrid(const std::function<void(unsigned int)>& run_block, unsigned int blocks);
  /// Waits for the blocks.
  ~RunningGrid();
  RunningGrid(const RunningGrid&) = delete;
  RunningGrid& operator=(const RunningGrid&) = delete;
  [[nodiscard]] bool done() const { return *left_ == 0; }

 private:
  std::shared_ptr<std::atomic<unsigned int>> left_;
};

}  // namespace emulated
